"""The functions of the schema, one signature each."""

import dataclasses
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from pyclient.database.calling import OMIT, Instant, Json, JsonList, Small, call

# ── rows that come back ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnqueuedJob:
    queue: str
    job_id: int
    created: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedJob:
    queue: str
    job_id: int
    job_type: str
    payload: Any
    attempt: int
    max_attempts: int
    due_at: datetime
    lateness: timedelta
    lease_token: int
    lease_expires_at: datetime
    idempotency_key: str | None = None
    attempt_key: str | None = None
    schedule: str | None = None
    tick_at: datetime | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailedJob:
    state: str
    due_at: datetime | None
    attempt: int


# ── producers ───────────────────────────────────────────────────────────────────────────────────────────────────────


@call
def enqueue(
    *,
    queue: str,
    job_type: str,
    payload: Json = OMIT,
    due_at: Instant = OMIT,
    priority: Small = OMIT,
    dedup_key: str | None = OMIT,
    dedup_for: timedelta | None = OMIT,
    concurrency_key: str | None = OMIT,
    idempotency_key: str | None = OMIT,
    max_attempts: int | None = OMIT,
    base_delay: timedelta | None = OMIT,
    max_delay: timedelta | None = OMIT,
    headers: Json = OMIT,
) -> EnqueuedJob: ...


@call
def enqueue_many(
    *,
    queue: str,
    job_type: str,
    payloads: JsonList,
    due_at: Instant = OMIT,
    priority: Small = OMIT,
    dedup_keys: Sequence[str | None] | None = OMIT,
    dedup_for: timedelta | None = OMIT,
    concurrency_keys: Sequence[str | None] | None = OMIT,
    idempotency_keys: Sequence[str | None] | None = OMIT,
    max_attempts: int | None = OMIT,
    base_delay: timedelta | None = OMIT,
    max_delay: timedelta | None = OMIT,
    headers: Json = OMIT,
) -> list[EnqueuedJob]: ...


@call
def cancel(*, queue: str, job_id: int, reason: str | None = OMIT) -> str: ...


@call
def redrive(
    *,
    queue: str,
    job_id: int = OMIT,
    reason: str | None = OMIT,
    job_type: str | None = OMIT,
    error_like: str | None = OMIT,
    batch_size: int = OMIT,
) -> list[int]: ...


# ── workers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@call
def claim_due(
    *,
    queue: str,
    worker: str,
    batch_size: int = OMIT,
    lease: timedelta | None = OMIT,
    job_types: Sequence[str] | None = OMIT,
) -> list[ClaimedJob]: ...


@call
def complete(
    *, queue: str, job_id: int, lease_token: int, result: Json = OMIT, external_id: str | None = OMIT
) -> None: ...


@call
def complete_many(
    *,
    queue: str,
    job_ids: Sequence[int],
    lease_tokens: Sequence[int],
    results: JsonList = OMIT,
    external_ids: Sequence[str | None] = OMIT,
) -> list[int]: ...


@call
def fail_with_backoff(
    *,
    queue: str,
    job_id: int,
    lease_token: int,
    error: str,
    permanent: bool = OMIT,
    retry_after: timedelta | None = OMIT,
) -> FailedJob: ...


@call
def release(*, queue: str, job_id: int, lease_token: int, reason: str | None = OMIT) -> FailedJob: ...


@call
def snooze(*, queue: str, job_id: int, lease_token: int, until: Instant, reason: str | None = OMIT) -> FailedJob: ...


@call
def doze(
    *, queue: str, worker: str, at_most: timedelta = OMIT, job_types: Sequence[str] | None = OMIT
) -> datetime | None: ...


@call
def wake(*, queue: str, worker: str) -> None: ...


@call
def count_due(*, queue: str) -> int: ...


@call
def report_worker(
    *, worker: str, host: str, pid: int, version: str, queues: Sequence[str], concurrency: int, running: int
) -> None: ...


@call
def tick_if_stale(*, worker: str, stale_after: timedelta = OMIT) -> bool: ...


@call
def reclaim_expired(*, queue: str | None = OMIT, batch_size: int = OMIT) -> int: ...


@call
def retire_worker(*, worker: str) -> None: ...


@call
def put_job_type(
    *,
    queue: str,
    job_type: str,
    lease: timedelta | None = OMIT,
    max_attempts: int | None = OMIT,
    base_delay: timedelta | None = OMIT,
    max_delay: timedelta | None = OMIT,
    jitter: float | None = OMIT,
    schema: Json = OMIT,
    description: str | None = OMIT,
) -> None: ...


# ── schedules ───────────────────────────────────────────────────────────────────────────────────────────────────────


@call
def put_schedule(
    *,
    queue: str,
    name: str,
    cron: str | None = OMIT,
    job_type: str | None = OMIT,
    payload: Json = OMIT,
    timezone: str | None = OMIT,
    at: datetime | None = OMIT,
    template: str | None = OMIT,
    starts_at: datetime | None = OMIT,
    ends_at: datetime | None = OMIT,
    dst_gap: str | None = OMIT,
    dst_overlap: str | None = OMIT,
    jitter: timedelta | None = OMIT,
    max_fires: int | None = OMIT,
    overlap: str | None = OMIT,
    max_running: int | None = OMIT,
    catch_up: str | None = OMIT,
    max_age: timedelta | None = OMIT,
    max_runs: int | None = OMIT,
    pace: int | None = OMIT,
    after_schedule: str | None = OMIT,
    within: timedelta | None = OMIT,
    gate_closed: str | None = OMIT,
    gate_wait: timedelta | None = OMIT,
    priority: int = OMIT,
    max_attempts: int | None = OMIT,
    concurrency_key: str | None = OMIT,
    headers: Json = OMIT,
    description: str | None = OMIT,
    kind: str = OMIT,
) -> None: ...


# ── cron ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreviewedRun:
    run_at: datetime
    local_time: datetime
    utc_time: datetime
    utc_offset: str
    rule_kind: str
    note: str | None = None


@call
def describe_cron(*, cron: str) -> str: ...


@call
def next_runs(
    *,
    cron: str,
    timezone: str,
    after: datetime,
    count: int = OMIT,
    dst_gap: str = OMIT,
    dst_overlap: str = OMIT,
    anchor: datetime = OMIT,
) -> list[datetime]: ...


@call
def preview_cron(
    *,
    cron: str,
    timezone: str = OMIT,
    count: int = OMIT,
    after: datetime | None = OMIT,
    dst_gap: str = OMIT,
    dst_overlap: str = OMIT,
    anchor: datetime = OMIT,
) -> list[PreviewedRun]: ...


# ── operators ───────────────────────────────────────────────────────────────────────────────────────────────────────


@call
def start_ticking() -> str: ...


@call
def held() -> str | None: ...
