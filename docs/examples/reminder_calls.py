"""Call people when they asked to be called, once each, whatever breaks.

The other side de-duplicates on Idempotency-Key. It stays the same over all attempts, so a call whose answer was lost on
the way back is not made twice. A job that ends its worker is found again when its lease runs out.

    pyclient worker --app reminder_calls:app
"""

from datetime import datetime
from typing import Any

from pydantic import BaseModel

from pyclient import Almanac, JobContext, PermanentError, RetryAfter

app = Almanac()
CALLS = "https://calls.example.org/v1/calls"


class Call(BaseModel):
    phone: str
    text: str


@app.job("reminder_call", queue="calls", max_attempts=3, base_delay=60, timeout=30)
async def reminder_call(ctx: JobContext, call: Call) -> dict[str, Any]:
    answer = await ctx.http.post(CALLS, json={"to": call.phone, "say": call.text})
    if answer.status_code == 429:
        raise RetryAfter(float(answer.headers.get("retry-after", 60)))
    if answer.status_code == 422:
        raise PermanentError(f"{call.phone} cannot be called: {answer.text}")
    answer.raise_for_status()
    ctx.external_id = answer.json()["id"]
    ctx.logger.info("call initiated")
    return {"call": ctx.external_id}


def remind(phone: str, text: str, at: datetime) -> int:
    return app.enqueue(reminder_call, Call(phone=phone, text=text), due_at=at).job_id
