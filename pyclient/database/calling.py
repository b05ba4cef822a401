"""How a call is made: a signature becomes a statement, its answer what the annotation says."""

import dataclasses
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, cast, overload

import psycopg
import psycopg.rows
from psycopg import pq, sql
from psycopg.client_cursor import ClientCursorMixin
from psycopg.types.json import Jsonb

from pyclient import errors

P = ParamSpec("P")
R = TypeVar("R")
Connection = psycopg.Connection[Any]
AsyncConnection = psycopg.AsyncConnection[Any]
DatabaseError = psycopg.Error

Json = Annotated[Any, "jsonb"]
JsonList = Annotated[Sequence[Any], "jsonb[]"]
Small = Annotated[int, "smallint"]
# A time, or so long from the database's now: the caller's clock is not asked.
Instant = Annotated[datetime | timedelta, "instant"]
FROM_NOW = "from now"


class JsonText(str):
    """JSON that is text already; sent as it stands."""

    __slots__ = ()


# Stands for "not given": the argument is left out and the default of the SQL function holds. Typed Any so that it can
# be the default of every argument.
OMIT: Any = type("Omit", (), {"__repr__": lambda self: "OMIT", "__bool__": lambda self: False})()


@functools.cache
def call_sql(name: str, given: tuple[str, ...], casts: tuple[str, ...] = ()) -> bytes:
    """`select * from almanac.name(a => %(a)s, …)`, put together once, not for a third of each call's time.

    The column list comes from the function's result type: a later column does not disturb an older client.
    """
    typed = dict(zip(given, casts, strict=False))
    arguments = [
        sql.SQL("{} => {}{}{}").format(
            sql.Identifier(argument),
            sql.SQL("almanac.clock() + " if typed.get(argument) == FROM_NOW else ""),
            sql.Placeholder(argument),
            sql.SQL(f"::{typed[argument]}" if typed.get(argument, FROM_NOW) not in ("", FROM_NOW) else ""),
        )
        for argument in given
    ]
    call = sql.SQL("select * from almanac.{}({})").format(sql.Identifier(name), sql.SQL(", ").join(arguments))
    return call.as_bytes(None)


class _Rows:
    """Reads an answer as the annotation says: list[X], X | None, X or None; X a dataclass or a scalar."""

    def __init__(self, annotation: Any) -> None:
        self.many = typing.get_origin(annotation) is list
        arguments = typing.get_args(annotation)
        self.optional = annotation is None or annotation is type(None)
        self.nothing = self.optional
        row = annotation
        if self.many:
            (row,) = arguments
        elif typing.get_origin(annotation) in (typing.Union, types.UnionType) and type(None) in arguments:
            self.optional = True
            (row,) = (argument for argument in arguments if argument is not type(None))
        self.row: Callable[..., Any] | None = None
        self.fields: list[str] = []
        if isinstance(row, type) and dataclasses.is_dataclass(row):
            self.row, self.fields = row, [field.name for field in dataclasses.fields(row)]

    def read(self, result: pq.abc.PGresult | None, rows: list[tuple[Any, ...]]) -> Any:
        if self.nothing:
            return None
        if self.row is not None:
            assert result is not None
            columns = {(result.fname(position) or b"").decode(): position for position in range(result.nfields)}
            take = [(field, columns[field]) for field in self.fields if field in columns]
            # A function that returns one composite and found nothing answers with a row of nulls.
            read = [
                self.row(**{field: row[at] for field, at in take}) for row in rows if any(x is not None for x in row)
            ]
        else:
            read = [row[0] for row in rows]
        if self.many:
            return read
        return read[0] if read else None


def _adapter(annotation: Any) -> tuple[str, Callable[[Any], Any] | None]:
    """How an argument travels: the cast it needs, and what wraps its value."""
    for candidate in (annotation, *typing.get_args(annotation)):
        for hint in getattr(candidate, "__metadata__", ()):
            if hint == "jsonb":
                return "", lambda value: value if isinstance(value, JsonText) else Jsonb(value)
            if hint == "jsonb[]":
                # One text for all: adapted one by one they would take the client as long as the server takes for them.
                return "jsonb[]", lambda value: texts(map(json_text, value))
            return hint, None
    return "", None


class Call(Generic[P, R]):
    """One function of the schema, callable on a sync or an async connection."""

    def __init__(self, signature: Callable[P, R]) -> None:
        functools.update_wrapper(self, signature)
        self.name = signature.__name__
        hints = typing.get_type_hints(signature, include_extras=True)
        self.rows = _Rows(hints.pop("return"))
        parameters = inspect.signature(signature).parameters
        self.adapters = {name: _adapter(hints[name]) for name in parameters}
        self.integers = {name for name in parameters if int in (hints[name], *typing.get_args(hints[name]))}
        self.required = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}

    @property
    def arguments(self) -> Iterable[str]:
        return self.adapters.keys()

    def statement(self, arguments: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
        values = {}
        for name, value in arguments.items():
            if value is OMIT:
                continue
            try:
                wrap = self.adapters[name][1]
            except KeyError:
                raise TypeError(f"{self.name}() has no argument {name!r}") from None
            if name in self.integers and isinstance(value, float):
                # The database would say that it has no such function.
                raise TypeError(f"{self.name}(): {name} must be a whole number, not {value!r}")
            values[name] = wrap(value) if wrap is not None and value is not None else value
        return call_sql(self.name, tuple(values), tuple(map(self._cast, values, values.values()))), values

    def _cast(self, name: str, value: Any) -> str:
        hint = self.adapters[name][0]
        if hint == "instant":
            return FROM_NOW if isinstance(value, timedelta) else ""
        return hint

    @overload
    def __call__(self, conn: Connection, /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, conn: AsyncConnection, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
    def __call__(self, conn: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        statement, values = self.statement(kwargs)
        return (self._run_async if isinstance(conn, psycopg.AsyncConnection) else self._run)(conn, statement, values)

    def _run(self, conn: Connection, statement: bytes, values: dict[str, Any]) -> R:
        with translated(), conn.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
            _in_binary(cursor)
            try:
                cursor.execute(statement, values)
            except _NOT_AS_PREPARED:
                if not _is_idle(conn):
                    raise
                cursor.execute(statement, values, prepare=False)
            return cast(R, self.rows.read(cursor.pgresult, cursor.fetchall()))

    async def _run_async(self, conn: AsyncConnection, statement: bytes, values: dict[str, Any]) -> R:
        with translated():
            async with conn.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
                _in_binary(cursor)
                try:
                    await cursor.execute(statement, values)
                except _NOT_AS_PREPARED:
                    if not _is_idle(conn):
                        raise
                    await cursor.execute(statement, values, prepare=False)
                return cast(R, self.rows.read(cursor.pgresult, await cursor.fetchall()))


def _in_binary(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> None:
    """Times do not depend on the session's DateStyle then. Cursors that put the arguments into the text cannot."""
    if not isinstance(cursor, ClientCursorMixin):
        cursor.format = pq.Format.BINARY


# An upgrade has changed what the function returns, or a pooler that was not recognised shares the session. Outside a
# transaction of the caller's nothing has happened then, and the statement can be sent as if for the first time.
_NOT_AS_PREPARED = (
    psycopg.errors.FeatureNotSupported,
    psycopg.errors.InvalidSqlStatementName,
    psycopg.errors.DuplicatePreparedStatement,
)


def _is_idle(conn: Connection | AsyncConnection) -> bool:
    return conn.info.transaction_status == pq.TransactionStatus.IDLE


def call(signature: Callable[P, R]) -> Call[P, R]:
    return Call(signature)


class _Translated:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, psycopg.Error) and (known := errors.from_database(error)):
            raise known from error


_TRANSLATED = _Translated()


def translated() -> _Translated:
    """Errors of class PA leave as the exceptions of `errors`; all others stay psycopg's."""
    return _TRANSLATED


# ── arrays as text ──────────────────────────────────────────────────────────────────────────────────────────────────


def bigints(numbers: Iterable[int]) -> str:
    return "{" + ",".join(map(str, numbers)) + "}"


def json_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, JsonText) else json.dumps(value)


def texts(values: Iterable[str | None]) -> str:
    quoted = ("null" if x is None else '"' + x.replace("\\", "\\\\").replace('"', '\\"') + '"' for x in values)
    return "{" + ",".join(quoted) + "}"
