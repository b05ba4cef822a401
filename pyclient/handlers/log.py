"""`log`: writes its payload into the worker's log. For trying things out."""

from typing import Any

from pyclient.context import JobContext


async def handle(ctx: JobContext, payload: dict[str, Any]) -> None:
    """Write the payload into the log of the worker."""
    ctx.logger.info("log %s", payload)
