"""Typed jobs as classes, one summary for each user and day however often it is asked for.

pyclient worker --app daily_summary:app
"""

from datetime import date, timedelta

from pydantic import BaseModel

from pyclient import Almanac, JobContext

app = Almanac()
sent: list[str] = []


class Summary(BaseModel):
    user: str
    day: date


class DailySummaryHandler:
    """Made anew for each job."""

    @classmethod
    def payload_model(cls) -> type[BaseModel]:
        return Summary

    def handle(self, ctx: JobContext, payload: Summary) -> dict[str, str]:
        """A plain method runs in a thread; its lease is extended for as long as it takes."""
        for part in ("read", "write", "send"):
            if ctx.cancelled:
                break
            ctx.logger.debug("summary of %s: %s", payload.user, part)
        sent.append(payload.user)
        return {"user": payload.user, "day": payload.day.isoformat()}


app.register("daily_summary", DailySummaryHandler, max_attempts=5, base_delay=60, lease=30)


def summarise(user: str, day: date) -> bool:
    """Ask for the summary; False if somebody has already asked."""
    return app.enqueue(
        "daily_summary", Summary(user=user, day=day), dedup_key=f"summary:{user}:{day}", dedup_for=timedelta(days=2)
    ).created
