"""What `make demo` runs: three schedules and their handlers.

python docs/examples/demo.py                               on the PostgreSQL that comes along
cd docs/examples; pyclient --dsn … worker --app demo:app   the same app, on a database of yours
"""

import random

from pyclient import Almanac, JobContext

app = Almanac(queue="demo")


@app.schedule("*/3 * * * * *", name="greet", payload={"names": ["Ada", "Grace", "Barbara"]})
@app.job("greet")
def greet(ctx: JobContext, payload: dict) -> str:
    """Every three seconds. What a handler returns is kept with the job."""
    return f"Good day, {random.choice(payload['names'])}!"


@app.schedule("*/5 * * * * *", name="fetch prices")
@app.job("fetch_prices", max_attempts=3, base_delay=1)
def fetch_prices(ctx: JobContext) -> str:
    """Every five seconds, from somebody who often does not answer at first. A failed attempt is retried, later."""
    if ctx.attempt == 1 and random.random() < 0.6:
        raise ConnectionError("the other side did not answer")
    return f"prices came with attempt {ctx.attempt}"


@app.schedule("*/10 * * * * *", name="count up", overlap="skip")
@app.job("count_up")
async def count_up(ctx: JobContext) -> None:
    """Every ten seconds. The write and the end of the job commit together: the count is exact, whatever crashes."""
    async with ctx.transaction() as conn:
        await conn.execute("create table if not exists public.demo_count (id int primary key, count int not null)")
        await conn.execute(
            "insert into public.demo_count values (1, 1) on conflict (id) do update set count = demo_count.count + 1"
        )


if __name__ == "__main__":
    import show

    show.run("demo:app", queue="demo")
