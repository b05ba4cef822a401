"""Log lines: one event, fields after it. For people on a terminal, as JSON for machines.

A record made with `extra={"job": ctx}` carries the job's fields; they are read only when the line is written.
"""

import json
import logging
import sys
import time
from typing import Any

from pyclient.observe import tracing

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"job", "message", "asctime", "taskName"}


def fields(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = {}
    job = getattr(record, "job", None)
    if job is not None:
        found = {
            "job_id": job.job_id,
            "job_type": job.job_type,
            "queue": job.queue,
            "attempt": f"{job.attempt}/{job.max_attempts}",
            "worker": job.worker,
            "lateness": round(job.lateness.total_seconds(), 3),
        }
        if job.started_at is not None:
            found["duration"] = round(time.monotonic() - job.started_at, 4)
    found |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
    if (trace := tracing.trace_id()) is not None:
        found["trace_id"] = trace
    return found


class Human(logging.Formatter):
    """`12:30:01.123 INFO  processing job job_id=7 …`"""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{at}.{int(record.msecs):03d} {record.levelname:<7} {record.getMessage()}"
        if found := fields(record):
            first, newline, rest = line.partition("\n")
            line = first + " " + " ".join(f"{name}={value}" for name, value in found.items()) + newline + rest
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class Json(logging.Formatter):
    """One object a line."""

    def __init__(self, **always: Any) -> None:
        super().__init__()
        self.always = always

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.always,
            **fields(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def setup(style: str = "auto", level: str = "info") -> None:
    """Everything to stderr; `auto` is for people on a terminal, else JSON."""
    handler = logging.StreamHandler(sys.stderr)
    human = style == "human" or (style == "auto" and sys.stderr.isatty())
    handler.setFormatter(Human() if human else Json())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Their lines repeat ours.
    for noisy in ("httpx", "httpcore", "psycopg.pool"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
