"""83 metrics: figures for a monitoring system."""

from datetime import timedelta


def test_metrics_count_what_waits_runs_and_is_dead(db, clock):
    db.put_queue(queue="m")
    for _ in range(3):
        db.enqueue(queue="m", job_type="t", max_attempts=1)
    db.enqueue(queue="m", job_type="t", due_at=clock.now() + timedelta(hours=1))
    first, _ = db.claim_due(queue="m", worker="w", batch_size=2)
    db.fail_with_backoff(queue="m", job_id=first.job_id, lease_token=first.lease_token, error="no")
    clock.advance(minutes=5)
    figures = {
        metric: value
        for metric, queue, value in db.conn.execute("select metric, queue, value from almanac.metrics()")
        if queue == "m"
    }
    assert figures["jobs_scheduled"] == 2
    assert figures["jobs_due"] == 1
    assert figures["jobs_running"] == 1
    assert figures["jobs_dead"] == 1
    assert figures["queue_paused"] == 0
    assert 300 <= figures["oldest_due_seconds"] < 310
