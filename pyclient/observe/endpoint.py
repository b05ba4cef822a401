"""/metrics and /healthz, from a thread: it answers also while the event loop is blocked, and says so."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pyclient.observe.metrics import Histogram, Metrics

PREFIX = "almanac_worker"
COUNTERS = {
    "claimed": "Jobs claimed.",
    "completed": "Jobs completed.",
    "failed": "Attempts that failed.",
    "retried": "Attempts that failed and will be repeated.",
    "dead": "Jobs that failed for good.",
    "released": "Jobs given back unfinished.",
    "lost": "Leases that were lost.",
}
HISTOGRAMS = {
    "claim_seconds": "How long a claim that found something took.",
    "handler_seconds": "How long handlers took.",
    "lateness_seconds": "How long after their due time jobs were claimed.",
}


class Collector:
    """What prometheus_client asks for its samples."""

    def __init__(self, metrics: Metrics, gauges: Callable[[], dict[str, tuple[str, float]]]) -> None:
        self.metrics = metrics
        self.gauges = gauges

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for name, help_text in COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}_{name}", help_text, value=getattr(self.metrics, name))
        for name, help_text in HISTOGRAMS.items():
            histogram: Histogram = getattr(self.metrics, name)
            buckets, total = [], 0
            for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
            yield HistogramMetricFamily(f"{PREFIX}_{name}", help_text, buckets=buckets, sum_value=histogram.total)
        for name, (help_text, value) in self.gauges().items():
            yield GaugeMetricFamily(f"{PREFIX}_{name}", help_text, value=value)


class Endpoint:
    def __init__(
        self,
        port: int,
        metrics: Metrics,
        gauges: Callable[[], dict[str, tuple[str, float]]],
        trouble: Callable[[], str | None],
    ) -> None:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(Collector(metrics, gauges))

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds; each connection has a thread, also one that asks for nothing

            def do_GET(self) -> None:
                if self.path.split("?")[0] == "/metrics":
                    self.answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif self.path.split("?")[0] in ("/healthz", "/health"):
                    wrong = trouble()
                    self.answer(200 if wrong is None else 503, "text/plain", (wrong or "ok").encode() + b"\n")
                else:
                    self.answer(404, "text/plain", b"/metrics or /healthz\n")

            def answer(self, status: int, kind: str, body: bytes) -> None:
                # Whoever asked may have gone; that is no error of the worker.
                with contextlib.suppress(ConnectionError):
                    self.send_response(status)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """A scrape every few seconds is not news."""

        self.server = ThreadingHTTPServer(("", port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, name="endpoint", daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
