"""What can be seen of a worker: lines, numbers, health, traces, reports."""

import io
import json
import logging
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pyclient import Almanac, JobContext, Snooze
from pyclient.observe import logs, sentry
from pyclient.observe.endpoint import Endpoint
from pyclient.observe.metrics import Metrics
from tests.workers import Jobs, in_thread, run_due, wait_until


@pytest.fixture
def app(live_dsn: str) -> Iterator[Almanac]:
    app = Almanac(live_dsn)

    @app.job("fine")
    async def fine(ctx: JobContext) -> None:
        ctx.logger.info("working on it")

    @app.job("fails", max_attempts=1)
    async def fails(payload: dict[str, Any]) -> None:
        raise ValueError("broken")

    @app.job("fails_once")
    def fails_once() -> None:
        raise ValueError("for now")

    @app.job("snoozes")
    async def snoozes() -> None:
        raise Snooze(3600)

    yield app
    app.close()


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """What would be in the log, as JSON."""
    found: list[dict[str, Any]] = []
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logs.Json())
    handler.emit = lambda record: found.append(json.loads(handler.format(record)))  # type: ignore[method-assign]
    logger = logging.getLogger("pyclient")
    logger.addHandler(handler)
    previous, level = logger.level, logging.INFO
    logger.setLevel(level)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(previous)


def test_lines_say_which_job_and_how_it_went(app, live_dsn, lines):
    app.declare()
    made = {name: app.enqueue(name, {"secret": "do not log me"}) for name in ("fine", "fails", "fails_once")}
    run_due(app, live_dsn)
    by_job: dict[str, list[dict[str, Any]]] = {
        name: [line for line in lines if line.get("job_id") == job.job_id] for name, job in made.items()
    }
    assert [line["message"] for line in by_job["fine"]] == ["processing job", "working on it", "job done"]
    assert by_job["fails"][-1]["message"].startswith("job permanently failed error='ValueError: broken'")
    assert by_job["fails_once"][-1]["message"].startswith("job failed, scheduling retry retry_at=")
    assert [by_job[name][-1]["level"] for name in made] == ["info", "error", "warning"]
    done = by_job["fine"][-1]
    assert {"job_id", "job_type", "queue", "attempt", "lateness", "duration", "at", "worker"} <= set(done)
    assert (done["job_type"], done["queue"], done["attempt"]) == ("fine", "default", "1/5")
    assert "do not log me" not in json.dumps(lines)


def test_lines_for_people_are_one_event_with_fields():
    record = logging.makeLogRecord({"levelno": 20, "levelname": "INFO", "msg": "worker started", "created": 0.5})
    record.queues = "a,b"
    assert logs.Human().format(record).endswith("INFO    worker started queues=a,b")


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scraped(port: int) -> dict[str, str]:
    status, text = get(port, "/metrics")
    assert status == 200
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_metrics_and_health_are_served(app, live_dsn):
    app.declare()
    jobs = Jobs(live_dsn)
    with in_thread(app, live_dsn, metrics_port=0) as running:
        port = wait_until(lambda: running.worker.endpoint and running.worker.endpoint.port)
        made = [app.enqueue(name) for name in ("fine", "fine", "fails", "fails_once")]
        wait_until(lambda: [jobs.state(job) for job in made] == ["completed", "completed", "dead", "retrying"])
        wait_until(lambda: running.worker.metrics.failed == 2)
        samples = scraped(port)
        counts = {
            name: float(samples[f"almanac_worker_{name}_total"])
            for name in ("claimed", "completed", "failed", "retried", "dead", "lost")
        }
        assert counts == {"claimed": 4, "completed": 2, "failed": 2, "retried": 1, "dead": 1, "lost": 0}
        assert float(samples['almanac_worker_handler_seconds_bucket{le="+Inf"}']) == 4
        assert float(samples["almanac_worker_lateness_seconds_count"]) == 4
        assert samples["almanac_worker_database_up"] == "1.0"
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/nothing")[0] == 404
        running.worker.keeper.beat -= 3600
        status, _ = get(port, "/healthz")
        if status == 200:  # the loop turned in between and said so
            running.worker.state.failed("claim", OSError("gone"))
            status, _ = get(port, "/healthz")
        assert status == 503
    jobs.close()


@pytest.fixture
def labourer(maintenance, worker_id) -> Iterator[str]:
    """A role that may work, and no more."""
    name = f"test_{worker_id}_labourer"
    maintenance.execute(f"drop role if exists {name}")
    maintenance.execute(f"create role {name} login in role almanac_worker")
    yield name
    maintenance.execute(f"drop role {name}")


def test_what_waits_is_shown_also_where_the_worker_may_only_work(app, live_dsn, labourer):
    app.declare()
    app.enqueue("fine")
    app.enqueue("fine", due_at=datetime.now(UTC) + timedelta(hours=1))
    with psycopg.connect(live_dsn) as conn:
        conn.execute("select almanac.pause_queue('default')")
    with in_thread(app, make_conninfo(live_dsn, user=labourer), metrics_port=0) as running:
        port = wait_until(lambda: running.worker.endpoint and running.worker.endpoint.port)
        wait_until(lambda: scraped(port)["almanac_worker_due"] == "1.0")


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A provider of traces, and the spans that it was given."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    monkeypatch.setattr("opentelemetry.trace.get_tracer", lambda name: provider.get_tracer(name))
    return provider, memory


@pytest.mark.parametrize("headers", ["{}", '{"traceparent": 5}', '{"tracestate": {"a": 1}}'])
def test_headers_that_carry_no_trace_are_no_obstacle(app, live_dsn, traces, headers):
    jobs = Jobs(live_dsn)
    (job,) = jobs.rows("select * from almanac.enqueue('default', 'fine', headers => %s)", headers)
    run_due(app, live_dsn)
    assert jobs.state(job) == "completed"
    jobs.close()


def test_a_trace_goes_from_whoever_enqueues_to_the_handler(app, live_dsn, traces):
    provider, memory = traces
    with provider.get_tracer("test").start_as_current_span("request") as parent:
        app.enqueue("fine")
        app.enqueue("fails_once")
    run_due(app, live_dsn)
    spans = {span.name: span for span in memory.get_finished_spans()}
    for name in ("process fine", "process fails_once"):
        assert spans[name].context.trace_id == parent.get_span_context().trace_id
        assert spans[name].parent.span_id == parent.get_span_context().span_id
    assert spans["process fine"].attributes["messaging.destination.name"] == "default"
    assert spans["process fails_once"].events[0].attributes["exception.message"] == "for now"


def test_errors_reach_sentry_with_the_job_and_without_its_payload(app, live_dsn):
    sdk = pytest.importorskip("sentry_sdk")
    events: list[Any] = []
    with sdk.new_scope() as scope:
        client = sdk.Client(dsn="https://key@sentry.invalid/1", before_send=lambda event, hint: events.append(event))
        scope.set_client(client)
        sdk.Scope.get_global_scope().set_client(client)
        try:
            assert sentry.is_active()
            job = app.enqueue("fails_once", {"secret": "do not send me"})
            app.enqueue("snoozes")
            run_due(app, live_dsn)
        finally:
            sdk.Scope.get_global_scope().set_client(None)
    (event,) = events
    assert event["exception"]["values"][-1]["value"] == "for now"
    assert event["contexts"]["job"]["job_id"] == job.job_id
    assert event["tags"]["almanac.job_type"] == "fails_once"
    assert "do not send me" not in json.dumps(event, default=str)


def test_who_goes_away_or_says_nothing_is_no_trouble(capfd):
    def slow() -> None:
        time.sleep(0.2)

    endpoint = Endpoint(0, Metrics(), dict, slow)
    try:
        handler: Any = endpoint.server.RequestHandlerClass
        assert 0 < handler.timeout <= 60
        handler.timeout = 0.2
        before = threading.active_count()
        gone = socket.create_connection(("127.0.0.1", endpoint.port))
        gone.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        with socket.create_connection(("127.0.0.1", endpoint.port)) as silent:
            assert silent.recv(1) == b"", "hung up on"
        time.sleep(0.3)
        assert threading.active_count() <= before
    finally:
        endpoint.close()
    assert capfd.readouterr().err == ""
