"""Errors of handlers go to Sentry with the job beside them, if the application has set it up (extra `sentry`)."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from pyclient import outcomes

if TYPE_CHECKING:
    from pyclient.context import JobContext

try:
    import sentry_sdk
except ImportError:
    sentry_sdk = None  # type: ignore[assignment]

_PACKAGE = str(Path(__file__).parent.parent)
# What a handler says on purpose is not an error of the program.
ON_PURPOSE = (outcomes.Snooze, outcomes.Cancelled, outcomes.RetryAfter)


def is_active() -> bool:
    return sentry_sdk is not None and sentry_sdk.get_client().is_active()


@contextlib.contextmanager
def reported(ctx: "JobContext") -> Iterator[None]:
    """Each job in a scope of its own, with what identifies it; the payload is not attached."""
    with sentry_sdk.isolation_scope() as scope:
        scope.set_transaction_name(f"job {ctx.job_type}")
        scope.set_tag("almanac.queue", ctx.queue)
        scope.set_tag("almanac.job_type", ctx.job_type)
        scope.set_context(
            "job",
            {
                "job_id": ctx.job_id,
                "job_type": ctx.job_type,
                "queue": ctx.queue,
                "attempt": ctx.attempt,
                "max_attempts": ctx.max_attempts,
                "lateness_s": ctx.lateness.total_seconds(),
                "idempotency_key": ctx.idempotency_key,
                "schedule": ctx.schedule,
            },
        )
        try:
            yield
        except Exception as error:
            if not isinstance(error, ON_PURPOSE):
                whole = error.__traceback__
                error.__traceback__ = _from_the_handler_on(whole)
                scope.capture_exception(error)
                error.__traceback__ = whole
            raise


def _from_the_handler_on(traceback: TracebackType | None) -> TracebackType | None:
    """Without the frames of this package: their local variables have the payload, and Sentry sends those."""
    rest = traceback
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        rest = rest.tb_next
    return rest or traceback
