"""Starts worker processes and replaces those that die: a handler can end its process (os._exit, a crash in C, the
kernel's out-of-memory killer), and then somebody else has to be there.

The supervisor imports nothing of the application and opens no connection, so it has nothing that could break.
"""

import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable

logger = logging.getLogger("pyclient.worker")

# Exit codes of a child that are not answered with another one: it ended as asked, or cannot run at all.
DONE, REFUSED = 0, 2
# What the supervisor ends with when it had to kill one: its jobs are repeated only after their leases have run out.
KILLED = 1
STOP = (signal.SIGTERM, signal.SIGINT)
LONGEST_PAUSE = 30.0
# A child that lived so long is not part of a crash loop.
SETTLED = 60.0
# Beyond the grace: the database may be slow to take the last results.
SLACK = 15.0


class _Child:
    def __init__(self, number: int) -> None:
        self.number = number
        self.pid: int | None = None
        self.began = 0.0
        self.deaths = 0
        self.start_at = 0.0
        self.done = False


def supervise(count: int, work: Callable[[int, int], int], grace: float) -> int:
    """Run `work(number, lifeline)` in `count` processes until a signal; the exit code to end with.

    `lifeline` is a descriptor that becomes readable when the supervisor is gone: then the child stops by itself.
    """
    read_end, write_end = os.pipe()
    waker_read, waker_write = os.pipe()
    for end in (waker_read, waker_write):
        os.set_blocking(end, False)
    asked: list[int] = []
    children = [_Child(number) for number in range(count)]

    def asked_to_stop(number: int, _: object) -> None:
        asked.append(number)
        for child in children:
            if child.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    # Once is all a child hears of SIGTERM, which others send to the whole group as well.
                    os.kill(child.pid, signal.SIGTERM if len(asked) == 1 else signal.SIGQUIT)

    previous = {
        number: signal.signal(number, handler)
        for number, handler in (
            (signal.SIGTERM, asked_to_stop),
            (signal.SIGINT, asked_to_stop),
            # Without a handler of ours the wake-up descriptor hears nothing of it.
            (signal.SIGCHLD, lambda *_: None),
        )
    }
    old_waker = signal.set_wakeup_fd(waker_write)
    code, kill_at = DONE, None
    try:
        while True:
            now = time.monotonic()
            for child in children:
                if child.pid is not None or child.done or now < child.start_at:
                    continue
                # Held back until the child is known here, and there has left the supervisor's handlers behind.
                signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
                if not asked:
                    child.began = now
                    child.pid = os.fork()
                    if child.pid == 0:
                        signal.set_wakeup_fd(old_waker)
                        for number, handler in previous.items():
                            signal.signal(number, handler)
                        signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
                if child.pid == 0:
                    for end in (write_end, waker_read, waker_write):
                        os.close(end)
                    _become(work, child.number, read_end)
            if asked and kill_at is None:
                logger.info("supervisor stopping grace=%gs", grace)
                kill_at = time.monotonic() + grace + SLACK
            code = max(code, _reap(children, bool(asked)))
            if all(child.pid is None and (child.done or asked) for child in children):
                return code
            if kill_at is not None and time.monotonic() > kill_at:
                for child in children:
                    if child.pid is not None:
                        logger.error("worker process does not stop and is killed pid=%d", child.pid)
                        os.kill(child.pid, signal.SIGKILL)
                        code = max(code, KILLED)
                kill_at = time.monotonic() + 5
            waits = [child.start_at - now for child in children if child.pid is None and not child.done and not asked]
            select.select([waker_read], [], [], max(0.0, min([1.0, *waits])))
            with contextlib.suppress(BlockingIOError):
                os.read(waker_read, 4096)
    finally:
        signal.set_wakeup_fd(old_waker)
        for number, handler in previous.items():
            signal.signal(number, handler)
        for end in (read_end, write_end, waker_read, waker_write):
            os.close(end)


def _reap(children: list[_Child], stopping: bool) -> int:
    """Take note of processes that ended; the exit code if one of them cannot run at all."""
    worst = DONE
    for child in children:
        if child.pid is None:
            continue
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid == 0:
            continue
        child.pid = None
        code = os.waitstatus_to_exitcode(status)
        if code in (DONE, REFUSED):
            child.done = True
            worst = max(worst, code)
            continue
        if stopping:
            continue
        lived = time.monotonic() - child.began
        child.deaths = 1 if lived > SETTLED else child.deaths + 1
        pause = 0.0 if child.deaths == 1 else min(LONGEST_PAUSE, 0.25 * 2.0 ** (child.deaths - 2))
        child.start_at = time.monotonic() + pause
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        logger.error("worker process died pid=%d by=%r lived=%.1fs; replacing it in %.2gs", pid, how, lived, pause)
    return worst


def _become(work: Callable[[int, int], int], number: int, lifeline: int) -> None:
    """The rest of this process's life. It must not return into the supervisor's."""
    code = 1
    try:
        code = work(number, lifeline)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except BaseException:
        logger.exception("worker process failed")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
