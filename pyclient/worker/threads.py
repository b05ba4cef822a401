"""Threads for handlers that are not async. A handler that does not come back loses its thread, not its place: the
thread is abandoned (it cannot be ended) and another one takes its work."""

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any


class Threads:
    """As many threads as there are calls at once. Daemons: one that hangs does not keep the process from ending."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        #: Calls that have not come back. Not threads that wait: one that has just taken a call would be counted too.
        self._out = 0
        self._lock = threading.Lock()
        self.count = 0
        #: Calls that nobody waits for any more and that have not come back.
        self.abandoned = 0

    async def call(self, call: Callable[[], Any]) -> Any:
        """`submit`, counted as abandoned when whoever waits for it is cancelled."""
        future = self.submit(call)
        try:
            return await future
        except asyncio.CancelledError:
            # Unless the call itself raised it.
            if future.cancelled():
                self.abandoned += 1
            raise

    def submit(self, call: Callable[[], Any]) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        context = contextvars.copy_context()
        with self._lock:
            self._out += 1
            is_short = self._out > self.count
        if is_short:
            try:
                threading.Thread(target=self._run, name=f"handler-{self.count + 1}", daemon=True).start()
            except BaseException:
                # The system has no thread left. The caller hears of it, so the call must not be made after all.
                with self._lock:
                    self._out -= 1
                raise
            self.count += 1
        self._work.put((lambda: context.run(call), future))
        return future

    def _run(self) -> None:
        while True:
            call, future = self._work.get()
            try:
                outcome, raised = call(), None
            except BaseException as error:
                outcome, raised = None, error
            with self._lock:
                self._out -= 1
            try:
                future.get_loop().call_soon_threadsafe(self._deliver, future, outcome, raised)
            except RuntimeError:  # the loop is closed: the worker has ended
                return
            del call, future, outcome, raised

    def _deliver(self, future: "asyncio.Future[Any]", outcome: Any, raised: BaseException | None) -> None:
        if future.done():
            self.abandoned -= 1
        elif raised is None:
            future.set_result(outcome)
        elif isinstance(raised, StopIteration | GeneratorExit):
            # They would end the coroutine that waits, not only tell it.
            future.set_exception(RuntimeError(f"the handler raised {raised!r}"))
        else:
            future.set_exception(raised)
