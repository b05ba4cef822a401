"""Schedules live in the database: code declares them, an operator pauses and moves them, and no tick is decided twice.

select * from almanac.schedule_overview;
select almanac.pause_schedule('hourly digest', reason => 'the mail server moves');
select * from almanac.explain_tick('hourly digest', '2026-06-01 15:00+02');
"""

from typing import Any

from pyclient import Almanac, JobContext

app = Almanac()


@app.schedule("0 * * * *", name="hourly digest", timezone="Europe/Brussels", overlap="skip", catch_up="latest")
@app.job("digest")
async def digest(ctx: JobContext) -> dict[str, Any]:
    """One digest an hour; after downtime only the latest, and never two at once."""
    assert ctx.tick_at is not None
    return {"hour": ctx.tick_at.isoformat(), "caught_up": ctx.caught_up, "key": ctx.idempotency_key}


@app.schedule("0 2 * * 0", name="weekly cleanup")
def cleanup() -> None:
    """Sundays at two, by UTC: no clock change comes near it."""
