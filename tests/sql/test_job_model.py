"""The life of jobs against a model in plain Python: any sequence of calls, by several workers, with the clock moved.

After each step the tables equal the model, and each queue would be claimed in the order the model says.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import hypothesis
import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.jobs import Jobs

START = datetime(2030, 1, 1, 12, tzinfo=UTC)
QUEUES = ("plain", "limited", "keyed")
TYPES = ("x", "y")
KEYS = (None, "a", "a", "b")
LEASE = timedelta(minutes=5)

# The queue with keys has the most to go wrong.
queues = st.sampled_from(("plain", "limited", "keyed", "keyed"))
types = st.sampled_from(TYPES)
keys = st.sampled_from(KEYS)
which = st.integers(0, 10_000)
windows = st.sampled_from([None, timedelta(minutes=10)])


@dataclass
class Queue:
    max_running: int | None = None
    per_key: int = 1
    rate: tuple[int, timedelta] | None = None
    tokens: float = 0.0
    refilled_at: datetime = START
    base_delay: timedelta = timedelta(seconds=60)
    max_delay: timedelta = timedelta(minutes=10)
    max_attempts: int = 3
    paused: bool = False
    paused_until: datetime | None = None


@dataclass
class Job:
    id: int
    queue: str
    job_type: str
    priority: int
    due_at: datetime
    max_attempts: int
    key: str | None
    dedup_key: str | None
    state: str = "scheduled"
    attempt: int = 0
    token: int = 0
    worker: str | None = None
    expires_at: datetime | None = None
    cancel_requested: bool = False


@dataclass
class Ended:
    job: Job
    state: str
    finished_at: datetime
    redriven: bool = False


@dataclass
class Model:
    now: datetime = START
    queues: dict[str, Queue] = field(default_factory=dict)
    live: dict[int, Job] = field(default_factory=dict)
    history: list[Ended] = field(default_factory=list)
    attempts: Counter[tuple[int, int, str]] = field(default_factory=Counter)
    dedup: dict[tuple[str, str], tuple[int, datetime | None]] = field(default_factory=dict)

    # ── keys ──

    def take(self, queue: str, key: str, job_id: int, held_until: datetime | None) -> int:
        """Who holds the key afterwards."""
        holder = self.dedup.get((queue, key))
        if holder is None or (holder[1] is not None and holder[1] <= self.now):
            self.dedup[queue, key] = (job_id, held_until)
        return self.dedup[queue, key][0]

    # ── claims ──

    def running(self, queue: str) -> list[Job]:
        return [job for job in self.live.values() if job.queue == queue and job.state == "running"]

    def is_paused(self, queue: Queue) -> bool:
        return queue.paused and (queue.paused_until is None or queue.paused_until > self.now)

    def tokens(self, queue: Queue) -> float:
        assert queue.rate
        size, interval = queue.rate
        elapsed = max((self.now - queue.refilled_at).total_seconds(), 0.0)
        return min(float(size), queue.tokens + size * elapsed / interval.total_seconds())

    def claimable(self, name: str, batch_size: int, job_types: list[str] | None) -> list[Job]:
        queue = self.queues[name]
        if self.is_paused(queue):
            return []
        room, running = batch_size, self.running(name)
        if queue.max_running is not None:
            room = min(room, queue.max_running - len(running))
        if queue.rate:
            room = min(room, math.floor(self.tokens(queue)))
        busy = Counter(job.key for job in running)
        picked: list[Job] = []
        waiting = [
            job
            for job in self.live.values()
            if job.queue == name
            and job.state != "running"
            and job.due_at <= self.now
            and (job_types is None or job.job_type in job_types)
        ]
        for job in sorted(waiting, key=lambda job: (-job.priority, job.due_at, job.id)):
            if len(picked) >= room:
                break
            if job.key is None or busy[job.key] < queue.per_key:
                busy[job.key] += 1
                picked.append(job)
        return picked

    # ── ends ──

    def finish(self, job: Job, state: str) -> None:
        del self.live[job.id]
        self.history.append(Ended(job, state, self.now))
        if job.dedup_key is not None and self.dedup.get((job.queue, job.dedup_key), (0,))[0] == job.id:
            held_until = self.dedup[job.queue, job.dedup_key][1]
            if held_until is None or (state == "cancelled" and held_until > self.now):
                del self.dedup[job.queue, job.dedup_key]

    def end_attempt(
        self, job: Job, outcome: str, *, permanent: bool = False, retry_after: timedelta | None = None,
        due_at: datetime | None = None,
    ) -> str:  # fmt: skip
        queue = self.queues[job.queue]
        self.attempts[job.id, job.attempt, "cancelled" if job.cancel_requested else outcome] += 1
        if job.cancel_requested:
            self.finish(job, "cancelled")
            return "cancelled"
        if outcome == "released":
            job.state, job.attempt = "scheduled", job.attempt - 1
            job.due_at = due_at or job.due_at
        elif permanent or job.attempt >= job.max_attempts:
            self.finish(job, "dead")
            return "dead"
        else:
            delay = retry_after if retry_after is not None else queue.base_delay * 2 ** (job.attempt - 1)
            job.state = "retrying"
            job.due_at = self.now + (delay if retry_after is not None else min(delay, queue.max_delay))
        job.worker = job.expires_at = None
        return job.state


@dataclass(frozen=True)
class Lease:
    queue: str
    job_id: int
    token: int

    @property
    def arguments(self) -> dict[str, Any]:
        return {"queue": self.queue, "job_id": self.job_id, "lease_token": self.token}


LOOK = """
prepare live as
select id, queue, job_type, state, priority, due_at, attempt, max_attempts, lease_token, leased_by, lease_expires_at,
       cancel_requested_at is not null
  from almanac.job order by id;
prepare history as
select id, state, attempt, finished_at, redriven_at is not null, lease_token from almanac.job_history;
prepare attempts as
select job_id, attempt, outcome, count(*) from almanac.attempt_log where outcome is not null group by 1, 2, 3;
prepare dedup as
select queue, dedup_key, job_id, held_until from almanac.dedup;
prepare claimable as
select q, (almanac.claim_due(q, 'observer', 1000)).job_id from unnest(array['plain', 'limited', 'keyed']) as q;
"""


@dataclass
class World:
    """The sessions, held apart from the machine, whose attributes hypothesis looks through for rules."""

    workers: list[Jobs]
    observer: Jobs
    clock: Any
    empty: Any

    def look(self) -> list[list[tuple[Any, ...]]]:
        """What is in the tables, and what a claim of everything would get: in one round trip, and rolled back."""
        cursor = self.observer.conn.execute(
            "begin; execute live; execute history; execute attempts; execute dedup; execute claimable; rollback"
        )
        answers = []
        while cursor.nextset():
            if cursor.description:
                answers.append(cursor.fetchall())
        return answers


SETTINGS: list[dict[str, Any]] = [
    {"max_running": 1}, {"max_running": 3}, {"unset": ["max_running", "rate_limit"]},
    {"unset": ["max_running", "rate_limit"]}, {"max_running_per_key": 1}, {"max_running_per_key": 2},
    {"rate_limit": 2, "rate_interval": timedelta(minutes=1)}, {"base_delay": timedelta(0)},
    {"base_delay": timedelta(seconds=45)}, {"max_attempts": 1}, {"max_attempts": 3},
]  # fmt: skip

# What can happen, how often, and with which arguments. One rule draws from this list: as rules of their own, most of
# them would be left out of most runs, and jobs would seldom get beyond being enqueued.
ACTIONS: dict[str, tuple[int, dict[str, st.SearchStrategy[Any]]]] = {
    "clock_goes_on": (4, {"seconds": st.sampled_from([1, 30, 60, 240, 301, 900, 90_000])}),
    "clock_is_set_back": (2, {"seconds": st.sampled_from([2, 60, 3600])}),
    "put_queue": (2, {"queue": queues, "settings": st.sampled_from(SETTINGS)}),
    "pause_queue": (1, {"queue": queues, "minutes": st.sampled_from([1, 1, 10, None])}),
    "resume_queue": (2, {"queue": queues}),
    "enqueue": (6, {
        "queue": queues, "job_type": types, "priority": st.sampled_from([0, 0, 1, -1, 7]), "key": keys,
        "due": st.sampled_from([0, 0, 0, -30, -7200, 60, 600]), "dedup": st.sampled_from([None, None, "d1", "d2"]),
        "window": windows, "attempts": st.sampled_from([None, 1, 5]),
    }),
    "enqueue_many": (2, {
        "queue": queues, "job_type": types, "priority": st.sampled_from([0, 1]), "due": st.sampled_from([0, -60, 30]),
        "jobs": st.lists(st.tuples(keys, st.sampled_from([None, None, "d1", "d2", "d3"])), max_size=5),
        "window": windows,
    }),
    "claim_due": (9, {
        "queue": queues, "batch_size": st.sampled_from([1, 1, 2, 5, 100]),
        "job_types": st.sampled_from([None, None, ["x"], ["y"]]),
        "lease": st.sampled_from([None, timedelta(seconds=30)]),
    }),
    "extend_lease": (3, {"which": which, "lease": st.sampled_from([None, timedelta(hours=1), timedelta(seconds=1)])}),
    "release": (2, {"which": which}),
    "snooze": (2, {"which": which, "seconds": st.sampled_from([-100, 0, 60, 600])}),
    "complete": (4, {"which": which}),
    "complete_many": (2, {"queue": queues, "several": st.lists(which, max_size=5)}),
    "fail_with_backoff": (6, {
        "which": which, "permanent": st.sampled_from([False, False, True]),
        "retry_after": st.sampled_from([None, 0, 90]),
    }),
    "cancel": (3, {"which": which}),
    "redrive": (3, {
        "queue": queues, "job_type": st.sampled_from([None, "x"]), "batch_size": st.sampled_from([1, 100]),
    }),
    "reclaim_expired": (3, {}),
}  # fmt: skip
OFTEN = [name for name, (weight, _) in ACTIONS.items() for _ in range(weight)]


class JobMachine(RuleBasedStateMachine):
    world: ClassVar[World]
    steps: ClassVar[int] = 0
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.world.empty()
        self.model = Model()
        self.leases: list[Lease] = []
        self.world.clock.freeze(START)
        settings: dict[str, dict[str, Any]] = {
            "plain": {},
            "limited": {"max_running": 2, "rate_limit": 4, "rate_interval": timedelta(minutes=10)},
            "keyed": {"max_running_per_key": 1},
        }
        for name, limits in settings.items():
            self.put(name, base_delay=timedelta(seconds=60), max_delay=timedelta(minutes=10), max_attempts=3, **limits)

    @rule(action=st.sampled_from(OFTEN), data=st.data())
    def something_happens(self, action: str, data: st.DataObject) -> None:
        arguments = {name: data.draw(strategy, label=name) for name, strategy in ACTIONS[action][1].items()}
        # Nobody holds anything, or there is no job: then one more is made.
        acted_on = self.known_jobs() if action == "cancel" else self.leases
        if ("which" in arguments or "several" in arguments) and not acted_on:
            action, arguments = "enqueue", {
                "queue": "plain", "job_type": "x", "priority": 0, "key": None, "due": 0, "dedup": None, "window": None,
                "attempts": None,
            }  # fmt: skip
        getattr(self, action)(**arguments)

    # ── time ──

    def step(self) -> Jobs:
        """Every call is a microsecond after the one before."""
        type(self).steps += 1
        self.model.now = self.world.clock.advance(microseconds=1)
        return self.world.workers[self.steps % len(self.world.workers)]

    def clock_goes_on(self, seconds: int) -> None:
        self.step()
        self.model.now = self.world.clock.advance(seconds=seconds)

    def clock_is_set_back(self, seconds: int) -> None:
        # A parked job that is not due any more comes back with the housekeeper; the model has no housekeeper.
        if self.world.observer.parked():
            return
        self.step()
        self.model.now = self.world.clock.advance(seconds=-seconds)

    # ── queues ──

    def put(self, name: str, **settings: Any) -> None:
        self.world.workers[0].put_queue(queue=name, **settings)
        queue = self.model.queues.setdefault(name, Queue())
        queue.base_delay = settings.get("base_delay", queue.base_delay)
        queue.max_delay = settings.get("max_delay", queue.max_delay)
        queue.max_attempts = settings.get("max_attempts", queue.max_attempts)
        queue.per_key = settings.get("max_running_per_key", queue.per_key)
        queue.max_running = settings.get("max_running", queue.max_running)
        rate = (settings["rate_limit"], settings["rate_interval"]) if "rate_limit" in settings else queue.rate
        if "unset" in settings:
            queue.max_running, rate = None, None
        if rate != queue.rate and rate is not None:
            queue.tokens, queue.refilled_at = float(rate[0]), self.model.now
        queue.rate = rate

    def put_queue(self, queue: str, settings: dict[str, Any]) -> None:
        self.step()
        self.put(queue, **settings)

    def pause_queue(self, queue: str, minutes: int | None) -> None:
        until = None if minutes is None else self.model.now + timedelta(minutes=minutes)
        self.step().pause_queue(queue=queue, until=until)
        self.model.queues[queue].paused, self.model.queues[queue].paused_until = True, until

    def resume_queue(self, queue: str) -> None:
        self.step().resume_queue(queue=queue)
        self.model.queues[queue].paused = False

    # ── a job comes to be ──

    def made(self, queue: str, row: Any, due: int, dedup: str | None, window: timedelta | None, **known: Any) -> None:
        """What one answer of enqueue means for the model."""
        model = self.model
        if dedup is not None:
            held_until = None if window is None else model.now + window
            assert row.job_id == model.take(queue, dedup, row.job_id if row.created else -1, held_until)
        else:
            assert row.created
        if row.created:
            model.live[row.job_id] = Job(
                row.job_id, queue, due_at=model.now + timedelta(seconds=due), dedup_key=dedup, **known
            )

    def enqueue(
        self, queue: str, job_type: str, priority: int, key: str | None, due: int, dedup: str | None,
        window: timedelta | None, attempts: int | None,
    ) -> None:  # fmt: skip
        caller = self.step()
        key = key if queue == "keyed" else None
        (row,) = caller.enqueue(
            queue=queue, job_type=job_type, priority=priority, concurrency_key=key, dedup_key=dedup,
            dedup_for=None if dedup is None else window,
            max_attempts=attempts, due_at=self.model.now + timedelta(seconds=due),
        )  # fmt: skip
        self.made(
            queue, row, due, dedup, window, job_type=job_type, priority=priority, key=key,
            max_attempts=attempts or self.model.queues[queue].max_attempts,
        )  # fmt: skip

    def enqueue_many(
        self, queue: str, job_type: str, priority: int, due: int, jobs: list[tuple[str | None, str | None]],
        window: timedelta | None,
    ) -> None:  # fmt: skip
        caller = self.step()
        jobs = [(key if queue == "keyed" else None, dedup) for key, dedup in jobs]
        rows = caller.enqueue_many(
            queue=queue, job_type=job_type, priority=priority, payloads=[{}] * len(jobs),
            due_at=self.model.now + timedelta(seconds=due), concurrency_keys=[key for key, _ in jobs],
            dedup_keys=[dedup for _, dedup in jobs], dedup_for=window,
        )  # fmt: skip
        assert len(rows) == len(jobs)
        for row, (key, dedup) in zip(rows, jobs, strict=True):
            self.made(
                queue, row, due, dedup, window, job_type=job_type, priority=priority, key=key,
                max_attempts=self.model.queues[queue].max_attempts,
            )  # fmt: skip

    # ── a job is worked ──

    def claim_due(self, queue: str, batch_size: int, job_types: list[str] | None, lease: timedelta | None) -> None:
        caller = self.step()
        model = self.model
        expected = model.claimable(queue, batch_size, job_types)
        settings = model.queues[queue]
        if settings.rate and not model.is_paused(settings):
            tokens = model.tokens(settings)
            # An empty bucket that is dated ahead, because the clock was set back, fills from now on.
            if expected or (tokens < 1 and settings.refilled_at > model.now):
                settings.tokens, settings.refilled_at = tokens - len(expected), model.now
        worker = f"worker {self.steps % len(self.world.workers)}"
        rows = caller.claim_due(queue=queue, worker=worker, batch_size=batch_size, lease=lease, job_types=job_types)
        assert [row.job_id for row in rows] == [job.id for job in expected]
        for row, job in zip(rows, expected, strict=True):
            assert row.lease_token > job.token
            job.state, job.attempt, job.worker = "running", job.attempt + 1, worker
            job.token, job.expires_at = row.lease_token, model.now + (lease or LEASE)
            assert (row.attempt, row.lateness) == (job.attempt, model.now - job.due_at)
            self.leases.append(Lease(queue, row.job_id, row.lease_token))

    def holds(self, lease: Lease) -> Job | None:
        job = self.model.live.get(lease.job_id)
        if job and job.state == "running" and job.token == lease.token and job.expires_at:
            return job if job.expires_at > self.model.now else None
        return None

    def fenced(self, lease: Lease, call: str, /, **arguments: Any) -> tuple[Job | None, list[Any]]:
        """The call as its holder, or refused with PA002 if the model says that the lease is lost."""
        caller = self.step()
        if job := self.holds(lease):
            return job, getattr(caller, call)(**lease.arguments, **arguments)
        with pytest.raises(psycopg.Error) as caught:
            getattr(caller, call)(**lease.arguments, **arguments)
        assert caught.value.sqlstate == "PA002"
        return None, []

    # Mostly one that is held, sometimes one that was lost long ago.
    def lease(self, which: int) -> Lease:
        alive = [lease for lease in self.leases if self.holds(lease)]
        choice = alive if alive and which % 5 else self.leases
        return choice[which % len(choice)]

    def extend_lease(self, which: int, lease: timedelta | None) -> None:
        job, rows = self.fenced(self.lease(which), "extend_lease", lease=lease)
        if job:
            assert job.expires_at
            job.expires_at = max(job.expires_at, self.model.now + (lease or LEASE))
            assert rows[0].lease_expires_at == job.expires_at
            assert (rows[0].cancel_requested_at is not None) == job.cancel_requested

    def release(self, which: int) -> None:
        job, rows = self.fenced(self.lease(which), "release")
        if job:
            assert rows[0].state == self.model.end_attempt(job, "released")

    def snooze(self, which: int, seconds: int) -> None:
        until = self.model.now + timedelta(seconds=seconds)
        job, rows = self.fenced(self.lease(which), "snooze", until=until)
        if job:
            assert rows[0].state == self.model.end_attempt(job, "released", due_at=until)

    def complete(self, which: int) -> None:
        lease = self.lease(which)
        if self.was_completed(lease):
            self.step().complete(**lease.arguments)
            return
        job, _ = self.fenced(lease, "complete")
        if job:
            self.model.attempts[job.id, job.attempt, "completed"] += 1
            self.model.finish(job, "completed")

    def was_completed(self, lease: Lease) -> bool:
        return any(
            ended.state == "completed" and ended.job.id == lease.job_id and ended.job.token == lease.token
            for ended in self.model.history
        )

    def complete_many(self, queue: str, several: list[int]) -> None:
        leases = [lease for lease in dict.fromkeys(map(self.lease, several)) if lease.queue == queue]
        caller = self.step()
        accepted = {lease.job_id for lease in leases if self.holds(lease) or self.was_completed(lease)}
        rows = caller.complete_many(
            queue=queue, job_ids=[lease.job_id for lease in leases], lease_tokens=[lease.token for lease in leases]
        )
        assert sorted(row[0] for row in rows) == sorted(accepted)
        for lease in leases:
            if job := self.holds(lease):
                self.model.attempts[job.id, job.attempt, "completed"] += 1
                self.model.finish(job, "completed")

    def fail_with_backoff(self, which: int, permanent: bool, retry_after: int | None) -> None:
        delay = None if retry_after is None else timedelta(seconds=retry_after)
        job, rows = self.fenced(
            self.lease(which), "fail_with_backoff", error="it's wrong", permanent=permanent, retry_after=delay
        )
        if job:
            attempt = job.attempt
            state = self.model.end_attempt(job, "failed", permanent=permanent, retry_after=delay)
            assert rows[0] == (state, job.due_at if state == "retrying" else None, attempt)

    # ── a job ends otherwise ──

    def known_jobs(self) -> list[int]:
        return sorted({*self.model.live, *(ended.job.id for ended in self.model.history)})

    def cancel(self, which: int) -> None:
        caller = self.step()
        job_id = self.known_jobs()[which % len(self.known_jobs())]
        job = self.model.live.get(job_id)
        if job is None:
            last = [ended for ended in self.model.history if ended.job.id == job_id][-1]
            if last.state != "cancelled":
                with pytest.raises(psycopg.Error) as caught:
                    caller.cancel(queue=last.job.queue, job_id=job_id)
                assert caught.value.sqlstate == "PA003"
                return
            assert caller.cancel(queue=last.job.queue, job_id=job_id)[0].cancel == "cancelled"
        elif job.state == "running":
            assert caller.cancel(queue=job.queue, job_id=job_id)[0].cancel == "running"
            job.cancel_requested = True
        else:
            assert caller.cancel(queue=job.queue, job_id=job_id)[0].cancel == "cancelled"
            self.model.finish(job, "cancelled")

    def redrive(self, queue: str, job_type: str | None, batch_size: int) -> None:
        caller = self.step()
        model = self.model
        found = [
            ended
            for ended in sorted(model.history, key=lambda ended: (ended.finished_at, ended.job.id))
            if ended.state == "dead"
            and not ended.redriven
            and ended.job.queue == queue
            and job_type in (None, ended.job.job_type)
            and not self.key_is_anothers(ended.job)
        ][:batch_size]
        winners: dict[str, int] = {}
        for ended in sorted(found, key=lambda ended: ended.job.id):
            if ended.job.dedup_key is not None:
                winners.setdefault(ended.job.dedup_key, model.take(queue, ended.job.dedup_key, ended.job.id, None))
        back = [e for e in found if e.job.dedup_key is None or winners[e.job.dedup_key] == e.job.id]
        rows = caller.redrive(queue=queue, job_type=job_type, batch_size=batch_size)
        assert [row.redrive for row in rows] == [ended.job.id for ended in back]
        for ended in back:
            ended.redriven = True
            dead = ended.job
            model.live[dead.id] = Job(
                dead.id, queue, dead.job_type, dead.priority, model.now, dead.max_attempts, dead.key, dead.dedup_key,
                token=dead.token,
            )  # fmt: skip

    def key_is_anothers(self, job: Job) -> bool:
        if job.dedup_key is None or (job.queue, job.dedup_key) not in self.model.dedup:
            return False
        holder, held_until = self.model.dedup[job.queue, job.dedup_key]
        return holder != job.id and (held_until is None or held_until > self.model.now)

    def reclaim_expired(self) -> None:
        caller = self.step()
        expired = [
            job for job in self.model.live.values()
            if job.state == "running" and job.expires_at and job.expires_at <= self.model.now
        ]  # fmt: skip
        assert caller.reclaim_expired()[0].reclaim_expired == len(expired)
        for job in sorted(expired, key=lambda job: (job.queue, job.id)):
            self.model.end_attempt(job, "lost")

    def teardown(self) -> None:
        type(self).seen.update(outcome for (_, _, outcome), n in self.model.attempts.items() for _ in range(n))
        type(self).seen.update("ended " + ended.state for ended in self.model.history)
        type(self).seen.update("redriven" for ended in self.model.history if ended.redriven)
        type(self).seen["claims"] += len(self.leases)
        type(self).seen["jobs"] += len(self.known_jobs())

    # ── after each step ──

    @invariant()
    def the_database_equals_the_model(self) -> None:
        model = self.model
        live, history, attempts, dedup, claimable = self.world.look()
        assert live == [
            (job.id, job.queue, job.job_type, job.state, job.priority, job.due_at, job.attempt, job.max_attempts,
             job.token, job.worker, job.expires_at, job.cancel_requested)
            for _, job in sorted(model.live.items())
        ]  # fmt: skip
        assert Counter(history) == Counter(
            (e.job.id, e.state, e.job.attempt, e.finished_at, e.redriven, e.job.token) for e in model.history
        )
        assert {(job_id, attempt, outcome): n for job_id, attempt, outcome, n in attempts} == model.attempts
        assert {(queue, key): (job_id, until) for queue, key, job_id, until in dedup} == model.dedup
        assert self.world.observer.unwatched() == []
        for queue in QUEUES:
            expected = [job.id for job in model.claimable(queue, 1000, None)]
            assert [job_id for name, job_id in claimable if name == queue] == expected, queue


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_sequence_of_calls_does_what_the_model_does(request, jobs, session, clock, shared_database):
    full = request.config.getoption("--full")
    # The driver's own prepared statements are off: with them, it would drop ours after each rollback.
    observer = session(prepare_threshold=None)
    observer.sql(LOOK)
    JobMachine.world = World([session(), session(), session()], observer, clock, shared_database.emptied)
    JobMachine.steps = 0
    JobMachine.seen.clear()
    # Jobs have to get to every end there is, or this has tested little.
    ends = ("completed", "failed", "lost", "released", "cancelled", "ended dead", "ended cancelled", "redriven")
    for _ in range(4):
        run_state_machine_as_test(
            JobMachine,
            settings=hypothesis.settings(
                max_examples=150 if full else 22, stateful_step_count=150 if full else 110, deadline=None,
                # Shrinking takes minutes; the blob repeats a failure, and then it can be shrunk.
                phases=[hypothesis.Phase.generate], print_blob=True, database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            ),
        )  # fmt: skip
        if JobMachine.steps >= 2000 and all(JobMachine.seen[end] for end in ends):
            break
    print(f"{JobMachine.steps} steps: {dict(JobMachine.seen)}")
    assert JobMachine.steps >= 2000
    assert all(JobMachine.seen[end] for end in ends)
