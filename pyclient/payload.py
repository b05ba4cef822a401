"""Payloads and results: what JSON becomes for a handler, by its annotation, and what becomes of its answer.

A handler that asks for a plain dict gets what was enqueued, untouched and unchecked. Everything else (a pydantic
model, a dataclass, a TypedDict, list[int], …) is validated by pydantic.
"""

import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

import pydantic
import pydantic_core
import typing_extensions

from pyclient.outcomes import PermanentError

_AS_IT_IS: tuple[Any, ...] = (dict, list, Any, object, None, type(None))


class NotJson(PermanentError):
    """A handler returned something that has no form in JSON. The work is done; a retry would only do it again."""


def reader(annotation: Any) -> Callable[[Any], Any] | None:
    """How to turn a payload into what the annotation asks for; None: hand it over as it is."""
    if annotation in _AS_IT_IS or (typing.get_origin(annotation) in (dict, Mapping) and _plain(annotation)):
        return None
    adapter = pydantic.TypeAdapter(_with_fields(annotation))
    name = getattr(annotation, "__name__", str(annotation))

    def read(payload: Any) -> Any:
        try:
            # As JSON, which a payload is: a strict model takes a time as text from there, and nowhere else.
            return adapter.validate_json(pydantic_core.to_json(payload))
        except pydantic.ValidationError as error:
            raise PermanentError(f"payload does not fit {name}: {readable(error)}") from None

    return read


def _plain(annotation: Any) -> bool:
    return typing.get_args(annotation) in ((), (str, Any), (str, object))


def _with_fields(annotation: Any) -> Any:
    """Before Python 3.12 pydantic reads only the TypedDict of typing_extensions; the same again as one of those."""
    if sys.version_info >= (3, 12) or not typing.is_typeddict(annotation):
        return annotation
    fields = {
        name: hint
        if typing.get_origin(hint) in (typing.Required, typing.NotRequired) or name not in annotation.__optional_keys__
        else typing_extensions.NotRequired[hint]
        for name, hint in typing.get_type_hints(annotation, include_extras=True).items()
    }
    return typing_extensions.TypedDict(annotation.__name__, fields)  # type: ignore[operator]


def readable(error: pydantic.ValidationError) -> str:
    """`phone: Field required; text: Input should be a valid string`, without the payload's values."""
    return "; ".join(
        ".".join(str(part) for part in problem["loc"]) + ": " + problem["msg"] if problem["loc"] else problem["msg"]
        for problem in error.errors(include_url=False, include_input=False)
    )


def schema(annotation: Any) -> dict[str, Any] | None:
    """The JSON schema that goes with the annotation, for people who enqueue by hand."""
    if reader(annotation) is None:
        return None
    try:
        return pydantic.TypeAdapter(_with_fields(annotation)).json_schema()
    except (pydantic.PydanticInvalidForJsonSchema, pydantic.PydanticUserError):
        return None


def to_payload(value: Any) -> Any:
    """What is enqueued: objects and lists of plain JSON values."""
    return {} if value is None else pydantic_core.to_jsonable_python(value)


def to_result(value: Any) -> str:
    """The JSON text of a handler's answer, in a form PostgreSQL takes: no NUL, no NaN, no lone surrogate."""
    try:
        text = pydantic_core.to_json(value, inf_nan_mode="null").decode()
    except (pydantic_core.PydanticSerializationError, UnicodeError, ValueError, RecursionError) as error:
        kind = type(value).__name__
        raise NotJson(f"the handler returned a {kind} that has no form in JSON: {error}") from None
    # A backslash in front of it belongs to the text: "\\u0000" is five harmless characters.
    return without_nul(text) if "\\u0000" in text else text


def without_nul(text: str) -> str:
    parts = text.split("\\\\")
    return "\\\\".join(part.replace("\\u0000", "\\ufffd") for part in parts)


def clean(text: str, limit: int = 10_000) -> str:
    """An error text that can be stored whatever is in it; the middle goes when it is too long."""
    text = text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8", "replace")
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]}\n… {len(text) - limit} characters left out …\n{text[-limit // 3 :]}"
