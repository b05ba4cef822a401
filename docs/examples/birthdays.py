"""Birthday greetings at nine in the morning, wherever the person is; also those missed while everything was down.

The greeting and the job for next year are one transaction: a person is never greeted twice, and never forgotten.

    create table person (id bigint primary key, name text, born date, timezone text);
    create table greeting (person_id bigint, year int, primary key (person_id, year));
"""

from datetime import datetime, time
from typing import Any, TypedDict
from zoneinfo import ZoneInfo

from pyclient import Almanac, JobContext
from pyclient.database import Connection

app = Almanac()


class Birthday(TypedDict):
    person: int
    year: int


def nine_o_clock(born: Any, year: int, timezone: str) -> datetime:
    day = born.replace(year=year) if (born.month, born.day) != (2, 29) else born.replace(year=year, month=3, day=1)
    return datetime.combine(day, time(9), ZoneInfo(timezone))


def plan(conn: Connection, person: int, year: int) -> None:
    """Make the job for this person's birthday in that year, in the caller's transaction."""
    row = conn.execute("select born, timezone from person where id = %s", [person]).fetchone()
    if row is not None:
        app.enqueue(
            "greet",
            Birthday(person=person, year=year),
            due_at=nine_o_clock(row[0], year, row[1]),
            dedup_key=f"birthday:{person}:{year}",
            conn=conn,
        )


@app.job("greet")
def greet(ctx: JobContext, birthday: Birthday) -> None:
    with ctx.transaction() as conn:
        conn.execute("insert into greeting values (%s, %s)", [birthday["person"], birthday["year"]])
        plan(conn, birthday["person"], birthday["year"] + 1)
        ctx.result = {"late_by": ctx.lateness.total_seconds()}
