"""What can go wrong, as exceptions: one class for each SQLSTATE of class PA.

The message is one line, `detail` states a fact, `hint` names the next action. sql/README.md has the same list.
"""

import psycopg


class AlmanacError(Exception):
    """An error somebody can act on."""

    sqlstate: str | None = None

    def __init__(self, message: str, *, detail: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint
        # A traceback shows the message alone; what to do next is the half that helps.
        for note in (detail, hint):
            if note:
                self.add_note(note)


class QueueUnknown(AlmanacError):
    sqlstate = "PA001"


class LeaseLost(AlmanacError):
    sqlstate = "PA002"


class JobNotFound(AlmanacError):
    """No such job, or not in a state for this."""

    sqlstate = "PA003"


class QueueRightMissing(AlmanacError):
    sqlstate = "PA004"


class PayloadRefused(AlmanacError):
    sqlstate = "PA005"


class ScheduleNotFound(AlmanacError):
    """No such schedule, or the name exists in several queues."""

    sqlstate = "PA006"


class CronRefused(AlmanacError):
    sqlstate = "PA007"


class TimeZoneRefused(AlmanacError):
    sqlstate = "PA008"


class ScheduleRefused(AlmanacError):
    sqlstate = "PA009"


class SchemaMismatch(AlmanacError):
    sqlstate = "PA010"


class TickingCannotStart(AlmanacError):
    sqlstate = "PA011"


class RevisionNotFound(AlmanacError):
    """No such revision of a schedule, or no such template."""

    sqlstate = "PA012"


class QueueInUse(AlmanacError):
    """A queue cannot be dropped while something lives in it."""

    sqlstate = "PA013"


class CopyNotAdopted(AlmanacError):
    """The database is a copy, which has to be adopted; or is none, and cannot be."""

    sqlstate = "PA014"


class CannotConnect(AlmanacError):
    """The database cannot be reached, or the DSN does not name one."""


class CannotServe(AlmanacError):
    """--metrics-port: the port is taken, or the extra is not installed."""


class AppNotFound(AlmanacError):
    """--app does not lead to an Almanac."""


class DeclarationRefused(AlmanacError):
    """A job or schedule of the app has an option that the database refuses."""


class InstallRefused(AlmanacError):
    """The installing role lacks a right, or something of the user's stands in the way."""


BY_SQLSTATE: dict[str, type[AlmanacError]] = {
    cls.sqlstate: cls for cls in AlmanacError.__subclasses__() if cls.sqlstate is not None
}


def from_database(error: psycopg.Error) -> AlmanacError | None:
    """The exception for an error of class PA; None for every other error, which stays what it is."""
    cls = BY_SQLSTATE.get(error.sqlstate or "")
    if cls is None:
        return None
    diag = error.diag
    return cls(diag.message_primary or str(error), detail=diag.message_detail, hint=diag.message_hint)
