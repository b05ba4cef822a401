"""A statement that one connection sends over and over, straight through libpq.

A cursor can do much that such a statement does not need. In a worker that was asleep all of that is done with cold
caches, and was half of what it had to do before it could start a job.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
import psycopg.errors
from psycopg import abc, generators, pq
from psycopg.adapt import Transformer

from pyclient.database.calling import AsyncConnection

#: Which loader reads which type, found out once for a connection.
_transformers: WeakKeyDictionary[AsyncConnection, abc.Transformer] = WeakKeyDictionary()


@dataclass(frozen=True)
class Statement:
    name: bytes
    text: bytes

    async def prepare(self, conn: AsyncConnection) -> None:
        """Before the first `send` on a connection. Does nothing where a pooler shares sessions."""
        if conn.prepare_threshold is not None:
            conn.pgconn.send_prepare(self.name, self.text)
            await _answer(conn, pq.ExecStatus.COMMAND_OK)

    def send(self, conn: AsyncConnection, parameters: Sequence[bytes | None]) -> None:
        """Without waiting. Parameters are text in the connection's encoding, None is null. The next that is done with
        the connection has to be `answer`. Not for pipelines."""
        if conn.prepare_threshold is not None:
            conn.pgconn.send_query_prepared(self.name, parameters, result_format=pq.Format.BINARY)
        else:
            conn.pgconn.send_query_params(self.text, parameters, result_format=pq.Format.BINARY)

    async def answer(self, conn: AsyncConnection) -> list[tuple[Any, ...]]:
        """The rows for what was sent, by the connection's loaders for binary."""
        result = await _answer(conn, pq.ExecStatus.TUPLES_OK)
        transformer = _transformers.get(conn)
        if transformer is None:
            transformer = _transformers[conn] = Transformer(conn)
        transformer.set_pgresult(result)
        rows = transformer.load_rows(0, result.ntuples, tuple)
        # What was read can be large, and the next call may be long in coming.
        transformer.set_pgresult(None)
        return rows


async def _answer(conn: AsyncConnection, expected: pq.ExecStatus) -> pq.abc.PGresult:
    # Waits as a cursor does: notices and notifications are heard, a task that is cancelled cancels the statement.
    result: pq.abc.PGresult = (await conn.wait(generators.execute(conn.pgconn)))[-1]
    if result.status != expected:
        raise psycopg.errors.error_from_result(result, encoding=conn.info.encoding)
    return result
