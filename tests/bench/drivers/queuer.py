"""PgQueuer on asyncpg and uvloop in batches of 1000. Called and answering as the Node drivers beside it."""

# mypy: ignore-errors
# Runs in an environment of its own, in which PgQueuer is installed and this project is not.

import asyncio
import json
import sys
import time
from datetime import timedelta

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.queries import Queries


async def install(dsn):
    conn = await asyncpg.connect(dsn)
    await Queries.from_asyncpg_connection(conn).install()


async def bulk(dsn, count):
    queries = Queries.from_asyncpg_connection(await asyncpg.connect(dsn))
    began = time.time()
    for start in range(0, count, 1000):
        size = min(1000, count - start)
        await queries.enqueue(["noop"] * size, [None] * size, [0] * size)
    return {"seconds": time.time() - began}


async def handling(dsn, handle):
    pool = await asyncpg.create_pool(dsn, min_size=4, max_size=4)
    queuer = PgQueuer.from_asyncpg_pool(pool)

    @queuer.entrypoint("noop")
    async def noop(job):
        handle(job)

    await queuer.run(batch_size=1000, dequeue_timeout=timedelta(seconds=30))


async def work(dsn, count):
    marks, handled = [], 0

    def hit(job):
        nonlocal handled
        handled += 1
        if handled == 1 or handled >= count * len(marks) / 4:
            marks.append((time.time(), handled))
        if handled == count:
            print(json.dumps({"marks": marks}), flush=True)

    await handling(dsn, hit)


async def stamp(dsn):
    await handling(dsn, lambda job: print(json.dumps({"number": int(job.payload), "at": time.time()}), flush=True))


async def paced(dsn, count, per_second):
    queries = Queries.from_asyncpg_connection(await asyncpg.connect(dsn))
    sent, began = {}, time.time()
    for number in range(count):
        await asyncio.sleep(max(0.0, began + number / per_second - time.time()))
        await queries.enqueue("noop", str(number).encode(), 0)
        sent[number] = time.time()
    return {"sent": sent}


if __name__ == "__main__":
    command, dsn, *numbers = sys.argv[1:]
    answer = uvloop.run(globals()[command](dsn, *map(int, numbers)))
    if answer:
        print(json.dumps(answer), flush=True)
