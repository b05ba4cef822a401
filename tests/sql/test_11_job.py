"""11 job: what cannot be in the table, whoever writes it. Tried as superuser, past every function."""

import psycopg
import pytest

JOB = {
    "queue": "q", "job_type": "t", "due_at": "2030-01-01", "max_attempts": 5, "created_at": "2030-01-01",
    "created_by": "somebody",
}  # fmt: skip
LEASE = {
    "state": "running", "attempt": 1, "lease_token": 1, "leased_by": "w", "claimed_at": "2030-01-01",
    "lease_expires_at": "2030-01-02",
}  # fmt: skip


def insert(jobs, table, values):
    columns, places = ", ".join(values), ", ".join(["%s"] * len(values))
    jobs.sql(f"insert into almanac.{table} ({columns}) values ({places})", *values.values())


def test_the_rows_that_the_refused_ones_are_made_of_are_accepted(jobs):
    insert(jobs, "job", JOB)
    insert(jobs, "job", JOB | LEASE)
    insert(jobs, "job", JOB | {"payload": "[]"})


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ({"state": "completed"}, "live_state_is_known"),
        ({"state": "dead"}, "live_state_is_known"),
        ({"leased_by": "w"}, "job_lease_only_while_running"),
        ({"lease_expires_at": "2030-01-01"}, "job_lease_only_while_running"),
        ({"claimed_at": "2030-01-01"}, "job_lease_only_while_running"),
        (LEASE | {"state": "retrying"}, "job_lease_only_while_running"),
        (LEASE | {"lease_token": 0}, "job_lease_only_while_running"),
        (LEASE | {"leased_by": None}, "job_lease_only_while_running"),
        (LEASE | {"claimed_at": None}, "job_lease_only_while_running"),
        (LEASE | {"lease_expires_at": None}, "job_lease_only_while_running"),
        (LEASE | {"attempt": 0}, "job_lease_only_while_running"),
        ({"attempt": -1}, "job_attempt_within_max"),
        ({"attempt": 6}, "job_attempt_within_max"),
        ({"max_attempts": 0}, "job_attempt_within_max"),
        ({"due_at": "infinity"}, "job_due_at_is_finite"),
        ({"due_at": "-infinity"}, "job_due_at_is_finite"),
        ({"payload": "1"}, "job_payload_is_object_or_array"),
        ({"payload": "null"}, "job_payload_is_object_or_array"),
        ({"payload": '"text"'}, "job_payload_is_object_or_array"),
        (LEASE | {"parked_at": "2030-01-01"}, "job_lease_only_while_running"),
        ({"cancel_requested_at": "2030-01-01"}, "job_lease_only_while_running"),
        ({"concurrency_key": " "}, "concurrency_key_is_readable"),
        ({"concurrency_key": "x" * 201}, "concurrency_key_is_readable"),
    ],
    ids=str,
)  # fmt: skip
def test_a_job_that_breaks_a_rule_is_refused_by_the_constraint_named_for_it(jobs, change, constraint):
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        insert(jobs, "job", JOB | change)
    assert caught.value.diag.constraint_name == constraint


def test_two_jobs_of_a_queue_cannot_have_one_id(jobs):
    insert(jobs, "job", JOB | {"id": 1})
    with pytest.raises(psycopg.errors.UniqueViolation):
        insert(jobs, "job", JOB | {"id": 1})
    insert(jobs, "job", JOB | {"id": 1, "queue": "other"})


HISTORY = JOB | {
    "id": 1, "state": "completed", "priority": 0, "payload": "{}", "attempt": 1, "caught_up": False, "lease_token": 1,
    "finished_at": "2030-01-01",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"state": "running"}, psycopg.errors.CheckViolation),
        ({"state": "scheduled"}, psycopg.errors.CheckViolation),
        ({"finished_at": None}, psycopg.errors.NotNullViolation),
        ({"redriven_at": "2030-01-01"}, psycopg.errors.CheckViolation),
    ],
    ids=str,
)
def test_history_holds_only_what_is_finished(jobs, change, error):
    insert(jobs, "job_history", HISTORY)
    with pytest.raises(error):
        insert(jobs, "job_history", HISTORY | {"id": 2} | change)


def test_only_history_has_a_time_of_finishing(jobs):
    columns = jobs.sql(
        "select table_name from information_schema.columns where table_schema = 'almanac'"
        " and column_name = 'finished_at' and table_name in ('job', 'job_history')"
    )
    assert columns == [("job_history",)]


def test_one_end_per_attempt(jobs):
    attempt = {
        "queue": "q", "job_id": 1, "attempt": 1, "lease_token": 7, "worker": "w", "claimed_at": "2030-01-01",
        "finished_at": "2030-01-01", "outcome": "failed",
    }  # fmt: skip
    insert(jobs, "attempt", attempt)
    with pytest.raises(psycopg.errors.UniqueViolation):
        insert(jobs, "attempt", attempt | {"outcome": "lost"})
    with pytest.raises(psycopg.errors.CheckViolation):
        insert(jobs, "attempt", attempt | {"lease_token": 8, "outcome": "completed"})
