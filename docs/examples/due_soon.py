"""Every hour, remind of the tasks that are due within a day; of each task once.

The mark on the task, the row of the audit trail, the job that sends and the end of this job are one transaction. If the
worker dies in the middle nothing of it has happened, and the next attempt does it all.

    create table task (id bigint primary key, title text, due_at timestamptz, reminded_at timestamptz);
    create table audit (task_id bigint, action text, at timestamptz default now());
"""

from pyclient import Almanac, JobContext

app = Almanac()

DUE = """
update task set reminded_at = now()
 where due_at between %(now)s and %(now)s + interval '24 hours' and reminded_at is null
returning id, title
"""


@app.schedule("0 * * * *", catch_up="latest")
@app.job("find_due_tasks")
async def find_due_tasks(ctx: JobContext) -> None:
    async with ctx.transaction() as conn:
        found = await (await conn.execute(DUE, {"now": ctx.tick_at or ctx.due_at})).fetchall()
        for task_id, title in found:
            await conn.execute("insert into audit (task_id, action) values (%s, 'reminder_sent')", [task_id])
            await app.enqueue_async("send_reminder", {"task": task_id, "title": title}, conn=conn)
        ctx.result = {"reminded": len(found)}


@app.job("send_reminder", max_attempts=5)
async def send_reminder(ctx: JobContext, payload: dict[str, object]) -> None:
    ctx.logger.info("reminder sent task=%s title=%r", payload["task"], payload["title"])
