"""The trace goes with the job: from whoever enqueues, in the job's headers, to the handler (extra `otel`)."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyclient.context import JobContext

try:
    from opentelemetry import propagate, trace
except ImportError:
    trace = None  # type: ignore[assignment]

enabled = trace is not None


def inject(headers: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The headers with the current trace context added; what the caller put there stays."""
    if not enabled or not trace.get_current_span().get_span_context().is_valid:
        return dict(headers) if headers else None
    carrier: dict[str, Any] = {}
    propagate.inject(carrier)
    return carrier | dict(headers or {})


def is_recording() -> bool:
    """Whether a span would go anywhere: without a provider of the application's the spans are empty."""
    return enabled and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


@contextlib.contextmanager
def span(ctx: "JobContext") -> Iterator[None]:
    """The span of one attempt, a child of the span that enqueued the job. Headers can be any JSON, and a job is not to
    fail over those that carry no trace."""
    headers: Any = ctx.headers
    carrier = headers if isinstance(headers, dict) else {}
    parent = propagate.extract({name: value for name, value in carrier.items() if isinstance(value, str)})
    attributes: dict[str, str | int | float] = {
        "messaging.system": "pg_almanac",
        "messaging.operation.name": "process",
        "messaging.destination.name": ctx.queue,
        "messaging.message.id": str(ctx.job_id),
        "almanac.job_type": ctx.job_type,
        "almanac.attempt": ctx.attempt,
        "almanac.lateness_s": ctx.lateness.total_seconds(),
    }
    with trace.get_tracer("pyclient").start_as_current_span(
        f"process {ctx.job_type}", context=parent, kind=trace.SpanKind.CONSUMER, attributes=attributes
    ):
        yield


def trace_id() -> str | None:
    """The current trace, for the log line."""
    if not enabled:
        return None
    context = trace.get_current_span().get_span_context()
    return format(context.trace_id, "032x") if context.is_valid else None
