"""What a handler can say by raising: never again, later, not yet, not at all. All else is a failed attempt."""

from datetime import datetime, timedelta


class PermanentError(Exception):
    """No further attempt will help: the job is dead at once."""


class RetryAfter(Exception):
    """The attempt failed; the next one comes after this long instead of after the backoff."""

    def __init__(self, delay: float | timedelta, reason: str | None = None) -> None:
        self.delay = delay if isinstance(delay, timedelta) else timedelta(seconds=delay)
        if self.delay < timedelta(0):
            raise ValueError("a delay cannot be negative")
        super().__init__(reason or f"retry after {self.delay}")


class Snooze(Exception):
    """Too early: the job is due again at `until` (or after that long), and the attempt does not count."""

    def __init__(self, until: datetime | timedelta | float, reason: str | None = None) -> None:
        if isinstance(until, datetime) and until.tzinfo is None:
            raise ValueError("until needs a time zone: datetime.now(timezone.utc) + ...")
        self.until = until if isinstance(until, datetime | timedelta) else timedelta(seconds=until)
        super().__init__(reason or f"snoozed until {self.until}")


class Cancelled(Exception):
    """The work is no longer wanted: the job ends as cancelled."""
