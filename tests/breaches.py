"""Bugs to plant, one for each of seventeen promises of docs/reliability.md: the tests that guard a promise must notice.

Each is a small change of one function of sql/, made in the databases of a test run and nowhere else:

    .venv/bin/pytest --breach stale_token tests/sql/test_51_complete.py

`make breaches` plants them all (tests/plant.py). The text to find is in its function exactly as often as is said here.
Where it is not, because the function has changed, nothing is planted and the run fails.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.sql import source

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"


class DoesNotApplyError(Exception):
    """The function is not there, or its text is not the one that the breach was written for."""


@dataclass(frozen=True)
class Breach:
    #: Also part of the names of databases and roles.
    name: str
    bug: str
    function: str
    find: str
    replace: str
    occurrences: int = 1

    def statement(self) -> str:
        """Replaces the installed function by one that has the bug."""
        texts = [function.text for function in source.functions() if function.name == self.function]
        found = sum(text.count(self.find) for text in texts)
        if len(texts) != 1 or found != self.occurrences:
            raise DoesNotApplyError(
                f"breach {self.name} does not apply any more: mend tests/breaches.py "
                f"({self.find!r} is {found} times in {self.function}, not {self.occurrences})"
            )
        return f"create or replace function almanac.{self.function}" + texts[0].replace(self.find, self.replace)


BREACHES = {
    breach.name: breach
    for breach in (
        Breach(
            "tick_twice",
            "a tick that the ledger has already is taken over instead of left alone",
            "_record_ticks", "do nothing", "do update set job_id = excluded.job_id",
        ),
        Breach(
            "unwritten_skip",
            "only ticks that fire are written down",
            "_record_ticks", "on conflict", "where d.job_id is not null on conflict",
        ),
        Breach(
            "stale_token",
            "the token is not compared when a job is completed",
            "_finish", "and job.lease_token = _finish.lease_tokens[width_bucket(job.id, _finish.job_ids)]", "", 2,
        ),
        Breach(
            "expired_lease",
            "a job can be failed, released and snoozed after its lease has expired",
            "_hold", "v_job.lease_expires_at <= almanac.clock()", "false",
        ),
        Breach(
            "repeat_refused",
            "a reply to complete that was lost cannot be asked for again",
            "complete_many", "cardinality(v_finished) < cardinality(complete_many.job_ids)", "false",
        ),
        Breach(
            "endless_silence",
            "a session that falls silent between complete and COMMIT keeps its job",
            "_limit_idle", "= '0'", "= 'never'",
        ),
        Breach(
            "uncounted_attempt",
            "a claim consumes an attempt only the first time",
            "claim_due", "job.attempt + 1", "greatest(job.attempt, 1)",
        ),
        Breach(
            "unwatched_lease",
            "where limits make a queue count what runs, leases without a key are not looked at",
            "reclaim_expired", "job.counted_at is not null", "job.concurrency_key is not null",
        ),
        Breach(
            "silent_loss",
            "complete does not tell that the lease was lost",
            "complete", "if not found", "if false",
        ),
        Breach(
            "own_clock",
            "a lease counts from the beginning of the transaction, by the server's clock",
            "claim_due", "(select almanac.clock())", "now()",
        ),
        Breach(
            "key_per_attempt",
            "the idempotency key is made of the time of the claim",
            "claim_due", "job.id, job.created_at)", "job.id, job.claimed_at)",
        ),
        Breach(
            "one_more_per_key",
            "one more than max_running_per_key jobs of a key run at once",
            "_pick_within_limits", "<= almanac._places(", "<= 1 + almanac._places(",
        ),
        Breach(
            "one_more_running",
            "one more than max_running jobs run at once",
            "_pick_within_limits", "v_queue.max_running -", "v_queue.max_running + 1 -",
        ),
        Breach(
            "window_cut_short",
            "the window of a dedup key is over when its job has ended",
            "_finish", "_finish.state = 'cancelled' and", "",
        ),
        Breach(
            "unheld_copy",
            "a copy does not notice that it is one",
            "_know_home", "almanac._is_copy()", "false",
        ),
        Breach(
            "right_not_asked",
            "whoever may call cancel may cancel in a queue that is restricted to others",
            "cancel", "perform almanac._open_queue(", "perform concat(",
        ),
        Breach(
            "open_search_path",
            "enqueue runs with the caller's search_path and the owner's rights",
            "enqueue", "set search_path = pg_catalog, pg_temp", "",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Promise:
    text: str
    tests: tuple[str, ...]
    breach: str | None


def promises() -> list[Promise]:
    """The lines of docs/reliability.md: | promise | tests | breach |."""
    rows = re.findall(r"^\| (.+?) \| (`.+`) \|(?: `(\w+)`)? \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [Promise(text, tuple(re.findall(r"`(.+?)`", tests)), breach or None) for text, tests, breach in rows]


def promise_of(breach: Breach) -> Promise:
    (promise,) = [promise for promise in promises() if promise.breach == breach.name]
    return promise
