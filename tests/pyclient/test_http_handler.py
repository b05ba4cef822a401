"""http: what is sent, what is repeated, what is refused."""

import base64
import contextlib
import gzip
import hashlib
import hmac
import json
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pyclient import Almanac, JobContext
from pyclient.handlers import http
from pyclient.settings import HttpPolicy, http_policy
from tests.workers import Jobs, run_due


class Receiver:
    """A web server that remembers what it was asked and answers as it was told."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.clients: list[Any] = []
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                receiver.clients.append(self.client_address)
                receiver.requests.append((self.command, self.path, dict(self.headers.items()), body))
                status, headers, answer = receiver.answers.get(self.path, (200, {}, b'{"ok": true}'))
                self.send_response(status)
                for name, value in ({"content-length": str(len(answer))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_PUT = handle_any  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://localhost:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


@pytest.fixture
def jobs(live_dsn: str) -> Iterator[Jobs]:
    jobs = Jobs(live_dsn)
    yield jobs
    jobs.close()


@pytest.fixture
def call(live_dsn: str, jobs: Jobs):
    """`call(payload, policy)`: the job, after a worker has had its turn."""

    def call(payload: dict[str, Any], policy: HttpPolicy | None = None) -> Any:
        app = Almanac(live_dsn)
        app.register("http", http.HttpHandler(policy or HttpPolicy(allowed_hosts=("localhost",))))
        # From somebody who does not have the handler, as SQL has not: one who has would hear of some mistakes at once.
        producer = Almanac(live_dsn)
        job = producer.enqueue("http", payload)
        producer.close()
        run_due(app, live_dsn)
        app.close()
        return jobs.one(job)

    return call


def test_a_request_carries_what_the_payload_says_and_a_key(call, receiver):
    job = call({"url": f"{receiver.url}/hook?a=1", "headers": {"X-Mine": "7"}, "json": {"n": "é"}})
    ((method, path, headers, body),) = receiver.requests
    assert (method, path, json.loads(body)) == ("POST", "/hook?a=1", {"n": "é"})
    assert headers["host"] == f"localhost:{receiver.port}"
    assert (headers["x-mine"], headers["content-type"]) == ("7", "application/json")
    assert str(job.job_id) in headers["idempotency-key"]
    assert job.state == "completed"
    assert (job.result["status"], job.result["body"], job.result["truncated"]) == (200, '{"ok": true}', False)


def test_with_a_secret_the_receiver_can_check_who_sent_it(call, receiver):
    secret = "whsec_" + base64.b64encode(b"very secret").decode()
    call({"url": f"{receiver.url}/", "body": "hello"}, HttpPolicy(("localhost",), secret=secret))
    ((_, _, headers, body),) = receiver.requests
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(b"very secret", signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"


@pytest.mark.parametrize(
    ("status", "state"),
    [(204, "completed"), (400, "dead"), (404, "dead"), (408, "retrying"), (425, "retrying"), (429, "retrying"),
     (500, "retrying"), (503, "retrying")],
)  # fmt: skip
def test_what_a_status_means(call, receiver, status, state):
    receiver.answers["/"] = (status, {}, b"" if status == 204 else b"because")
    job = call({"url": f"{receiver.url}/", "method": "GET"})
    assert job.state == state
    if state != "completed":
        assert f"{status} " in job.last_error
        assert "because" in job.last_error


def test_retry_after_is_honoured(call, receiver):
    receiver.answers["/"] = (503, {"Retry-After": "3600"}, b"")
    job = call({"url": f"{receiver.url}/"})
    assert timedelta(minutes=59) < job.due_at - datetime.now(UTC) <= timedelta(hours=1)


def test_retry_after_in_all_its_forms():
    assert http.retry_after("120") == timedelta(minutes=2)
    assert http.retry_after("99999999999999999999") == timedelta(days=1)
    later = http.retry_after(format_datetime(datetime.now(UTC) + timedelta(hours=2), usegmt=True))
    assert later is not None
    assert timedelta(minutes=119) < later <= timedelta(hours=2)
    assert http.retry_after(format_datetime(datetime.now(UTC) - timedelta(hours=2))) == timedelta(0)
    assert http.retry_after("soon") is None
    assert http.retry_after("9" * 5000) == timedelta(days=1)
    assert http.retry_after("²") is None
    assert http.retry_after(None) is None


def test_a_server_that_is_not_there_is_tried_again(call, receiver):
    receiver.server.shutdown()
    receiver.server.server_close()
    assert call({"url": f"{receiver.url}/"}).state == "retrying"


def test_a_slow_answer_is_not_waited_for(call, receiver):
    receiver.answers["/"] = (200, {"content-length": "100"}, b"only a part")
    job = call({"url": f"{receiver.url}/", "timeout": 0.3})
    assert job.state == "retrying"


def test_a_long_answer_is_kept_in_part(call, receiver):
    receiver.answers["/"] = (200, {}, b"x" * 5_000_000)
    job = call({"url": f"{receiver.url}/"})
    assert (len(job.result["body"]), job.result["truncated"]) == (http.KEPT, True)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "[::1]", "0.0.0.0", "2130706433", "[::ffff:127.0.0.1]"])
def test_the_machine_itself_is_refused(call, receiver, address):
    job = call({"url": f"http://{address}:{receiver.port}/"}, HttpPolicy())
    assert job.state in ("dead", "retrying")
    assert receiver.requests == []
    if job.state == "dead":
        assert "may not be called" in job.last_error
        assert "ALMANAC_HTTP_PRIVATE=1" in job.last_error


def test_a_redirect_to_the_inside_is_refused_too(call, receiver):
    receiver.answers["/"] = (302, {"Location": f"http://127.0.0.1:{receiver.port}/secret"}, b"")
    job = call({"url": f"{receiver.url}/"})
    assert job.state == "dead"
    assert "127.0.0.1 is not on the list" in job.last_error
    assert [path for _, path, _, _ in receiver.requests] == ["/"]


def test_redirects_are_followed_and_leave_secrets_behind(call, receiver):
    receiver.answers["/"] = (302, {"Location": f"http://127.0.0.1:{receiver.port}/next"}, b"")
    policy = HttpPolicy(("localhost", "127.0.0.1"), secret="s")
    job = call({"url": f"{receiver.url}/", "json": {}, "headers": {"Authorization": "Bearer x"}}, policy)
    assert job.state == "completed"
    (first, second) = receiver.requests
    assert (second[0], second[1], second[3]) == ("GET", "/next", b"")
    assert {"authorization", "webhook-signature"} <= set(first[2])
    assert not {"authorization", "webhook-signature"} & set(second[2])
    receiver.answers["/next"] = receiver.answers["/"]
    assert "redirects" in call({"url": f"{receiver.url}/"}, policy).last_error


def test_a_list_of_hosts_keeps_all_others_out(call):
    job = call({"url": "https://example.org/"}, HttpPolicy(("*.example.com",)))
    assert (job.state, "not on the list" in job.last_error) == ("dead", True)


@pytest.mark.parametrize("url", ["ftp://example.org/", "file:///etc/passwd", "nonsense", "http://", "http://[::1"])
def test_what_is_not_a_web_address_is_dead_at_once(call, url):
    assert call({"url": url}).state == "dead"


@pytest.mark.parametrize(
    "payload", [{}, {"url": "http://localhost/", "json": 1, "body": "x"}, {"url": 7}, {"uri": "x"}]
)
def test_a_payload_that_makes_no_sense_is_dead_with_the_reason(call, payload):
    job = call(payload)
    assert job.state == "dead"
    assert job.last_error.startswith("payload does not fit Request")


@pytest.mark.parametrize(
    ("address", "public"),
    [("93.184.216.34", True), ("10.0.0.1", False), ("169.254.169.254", False), ("100.64.0.1", False),
     ("192.168.1.1", False), ("224.0.0.1", False), ("fe80::1%eth0", False), ("fd00::1", False),
     ("2606:2800:220:1::1", True), ("::ffff:10.0.0.1", False), ("64:ff9b::a00:1", False), ("2002:a00:1::", False),
     ("::10.0.0.1", False), ("::ffff:0:10.0.0.1", False), ("64:ff9b:1::a00:1", False), ("fec0::1", False)],
)  # fmt: skip
def test_which_addresses_are_public(address, public):
    assert http.is_public(address) is public


def test_the_policy_comes_from_the_environment():
    assert http_policy({}) == HttpPolicy()
    found = http_policy(
        {"ALMANAC_HTTP_HOSTS": "a.org, *.b.org", "ALMANAC_HTTP_PRIVATE": "1", "ALMANAC_HTTP_SECRET": "s"}
    )
    assert found == HttpPolicy(("a.org", "*.b.org"), True, "s")
    assert "secret='s'" not in repr(found)


def test_a_key_reaches_the_receiver_as_it_is(live_dsn, jobs, receiver):
    app = Almanac(live_dsn)
    app.register("http", http.HttpHandler(HttpPolicy(("localhost",), secret="s")))
    job = app.enqueue("http", {"url": f"{receiver.url}/"}, idempotency_key="order 100%: 7")
    run_due(app, live_dsn)
    app.close()
    assert jobs.one(job).state == "completed"
    ((_, _, headers, body),) = receiver.requests
    assert headers["idempotency-key"] == headers["webhook-id"] == "order 100%: 7"
    expected = http.sign("s", headers["webhook-id"], body, at=int(headers["webhook-timestamp"]))
    assert headers["webhook-signature"] == expected["webhook-signature"]


@pytest.mark.parametrize(
    "headers",
    [{"Host": "inside.example"}, {"Content-Length": "1"}, {"transfer-encoding": "chunked"}, {"X Bad": "1"},
     {"X-Bad": "1\r\nX-Injected: 2"}, {"X-Bad": "é"}, {"X-Bad\n": "1"}],
    ids=["another host", "length", "framing", "a name with a space", "two lines", "no ASCII", "a name with a newline"],
)  # fmt: skip
def test_headers_that_cannot_be_sent_as_they_are_dead_with_the_reason(call, receiver, headers):
    job = call({"url": f"{receiver.url}/", "body": "hello", "headers": headers})
    assert (job.state, receiver.requests) == ("dead", [])
    assert job.last_error.startswith("payload does not fit Request: headers: ")


def test_jobs_share_neither_cookies_nor_connections(live_dsn, receiver):
    """Over TLS a connection was checked for the first host alone, and a server refuses to answer for another on it."""
    receiver.answers["/"] = (200, {"Set-Cookie": "session=of-the-first; Path=/"}, b"")
    app = Almanac(live_dsn)
    app.register("http", http.HttpHandler(HttpPolicy(("localhost", "127.0.0.1"))))
    for host in ("localhost", "127.0.0.1"):
        app.enqueue("http", {"url": f"http://{host}:{receiver.port}/"})
    run_due(app, live_dsn, concurrency=1)
    app.close()
    assert ["Cookie" in headers for _, _, headers, _ in receiver.requests] == [False, False]
    assert len(set(receiver.clients)) == 2


def test_a_redirect_to_another_port_leaves_secrets_behind(call, receiver):
    other = Receiver()
    receiver.answers["/"] = (307, {"Location": f"{other.url}/next"}, b"")
    call({"url": f"{receiver.url}/", "headers": {"Authorization": "Bearer x"}}, HttpPolicy(("localhost",), secret="s"))
    other.server.shutdown()
    other.server.server_close()
    ((_, path, headers, _),) = other.requests
    assert path == "/next"
    assert not {"authorization", "webhook-signature"} & set(headers)


@contextlib.contextmanager
def allocating() -> Iterator[Callable[[], int]]:
    """The most bytes that were allocated at one time inside of this block, beyond those at its beginning."""
    tracemalloc.start()
    try:
        before, peak = tracemalloc.get_traced_memory()[0], 0
        yield lambda: peak - before
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_answer_that_grows_when_unpacked_is_unpacked_in_part(call, receiver):
    once = gzip.compress(bytes(200_000_000))
    bombs = {"gzip": once, "deflate": zlib.compress(bytes(200_000_000)), "gzip, gzip": gzip.compress(once)}
    # Unpacked without a limit, the part that is read would already be more than is allowed for below.
    assert len(zlib.decompressobj(wbits=31).decompress(once[: 4 * http.KEPT])) > 30_000_000
    for encoding, bomb in bombs.items():
        receiver.answers["/"] = (200, {"Content-Encoding": encoding}, bomb)
        # Everything that Python allocates, buffers of zlib included, and only while this answer is read: what a test
        # before this one needed does not hide it.
        with allocating() as most:
            assert call({"url": f"{receiver.url}/"}).state == "completed"
        assert most() < 10_000_000
    receiver.answers["/"] = (200, {"Content-Encoding": "gzip"}, gzip.compress(b"packed all the same"))
    assert call({"url": f"{receiver.url}/"}).result["body"] == "packed all the same"
    assert receiver.requests[0][2]["accept-encoding"] == "identity"


@pytest.mark.parametrize("charset", ["hex", "bz2", "undefined", "unicode_escape", "no-such-charset"])
def test_an_answer_in_a_strange_charset_is_an_answer(call, receiver, charset):
    receiver.answers["/"] = (200, {"Content-Type": f"text/plain; charset={charset}"}, rb"done \ud800")
    job = call({"url": f"{receiver.url}/"})
    assert (job.state, job.result["body"][:4]) == ("completed", "done")


@pytest.mark.parametrize("url", ["http://a..b/", f"http://{'a' * 64}.org/"])
def test_a_name_that_cannot_be_is_dead_at_once(call, url):
    job = call({"url": url}, HttpPolicy())
    assert (job.state, job.last_error.partition(":")[0]) == ("dead", "cannot call this")


def test_credentials_in_a_url_are_not_in_the_error(call):
    assert "hush" not in call({"url": "ftp://me:hush@localhost/?token=hush"}).last_error


def test_hosts_on_the_list_are_written_in_any_case(call, receiver):
    assert call({"url": f"{receiver.url}/"}, HttpPolicy(("LocalHost",))).state == "completed"


# ── the client that a handler of one's own is lent ──────────────────────────────────────────────────────────────────


def test_requests_of_a_handler_carry_the_key_of_its_job(live_dsn, jobs, receiver):
    app = Almanac(live_dsn)

    @app.job("async")
    async def asynchronous(ctx: JobContext) -> None:
        (await ctx.http.post(f"{receiver.url}/async")).raise_for_status()

    @app.job("sync")
    def synchronous(ctx: JobContext) -> None:
        ctx.http_sync.post(f"{receiver.url}/sync").raise_for_status()

    made = [app.enqueue(name, idempotency_key=f"reminder #7, {name}") for name in ("async", "sync")]
    run_due(app, live_dsn)
    app.close()
    assert [jobs.state(job) for job in made] == ["completed"] * 2
    sent = {path: headers["Idempotency-Key"] for _, path, headers, _ in receiver.requests}
    assert sent == {f"/{name}": f"reminder #7, {name}" for name in ("async", "sync")}
