"""What the workers of the benchmarks run: handlers that only count, in a file that the benchmark reads."""

import mmap
import os
import struct
import time
from typing import Any

from pyclient import Almanac, JobContext

app = Almanac()
SLOTS = 16

_path = os.environ.get("ALMANAC_BENCH_COUNTS")
_counts: mmap.mmap | None = None
_slot = 0
_count = 0


def _open() -> mmap.mmap:
    """Each process counts in a slot of its own: the first that nobody has taken."""
    global _counts, _slot
    assert _path is not None
    with open(_path, "r+b") as file:
        _counts = mmap.mmap(file.fileno(), 16 * SLOTS)
    for _slot in range(SLOTS):
        (owner,) = struct.unpack_from("<q", _counts, 16 * _slot)
        if owner in (0, os.getpid()):
            break
    struct.pack_into("<q", _counts, 16 * _slot, os.getpid())
    return _counts


def _counted() -> None:
    global _count
    _count += 1
    struct.pack_into("<q", _counts or _open(), 16 * _slot + 8, _count)


@app.job("noop")
async def noop(payload: dict[str, Any]) -> None:
    _counted()


@app.job("write")
async def write(ctx: JobContext) -> None:
    """An effect that happens once: its row and the end of the job in one transaction."""
    async with ctx.transaction() as conn:
        await conn.execute("insert into public.effect values (%s)", [ctx.job_id])
    _counted()


@app.job("stamp")
async def stamp(payload: dict[str, Any]) -> dict[str, Any]:
    """When it was picked up, on the same clock as the benchmark's."""
    return {"picked_up": time.time()}
