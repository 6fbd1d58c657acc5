"""What a call takes, read as its types: the parameters of path and query, and the body in JSON.

Each parameter and field is a field of a `msgspec` struct, with its limits. A request that does not fit is refused
before its handler runs, with the name of what is wrong and what it must be. What a type cannot express (two fields that
exclude each other, the syntax of a subject) is checked by the `__post_init__` of the struct, which raises
`InvalidRequest` itself.

How a type is read is worked out once, when the server starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec
from aiohttp import web
from msgspec import inspect

from natslog.errors import InvalidRequest, did_you_mean

_WHOLE = re.compile(r"-?[0-9]{1,19}")
_MISSING = re.compile("Object missing required field `([^`]*)`")
_UNKNOWN = re.compile("Object contains unknown field `([^`]*)`")
_AT = re.compile(r"(?:.* - at `\$\.)(\w+)(.*)`", re.DOTALL)
_SHOWN_CHARS = 40
_AS_DESCRIBED = "as described in /openapi.json"


class Parameters:
    """Those of the path and the query of one call. `kind`: a struct, whose fields are in the query if the path does not
    have them; None: it takes none. `ignores_unknown`: others in the query are passed over.
    """

    def __init__(self, kind: type[Any] | None, path: str, *, ignores_unknown: bool) -> None:
        self._kind, self._ignores_unknown = kind, ignores_unknown
        self._fields = {} if kind is None else _fields(kind)
        self._readers = {name: _reader(of.type) for name, of in self._fields.items()}
        self._in_path = [name for name in names_in(path) if name in self._fields]
        self._in_query = [name for name in self._fields if name not in self._in_path]

    def of(self, request: web.Request) -> Any:
        """An instance of `kind`. Raises InvalidRequest: one is unknown, given twice, missing or not what it must be."""
        texts = self._texts(request.query)
        if self._kind is None:
            return None
        for name in self._in_path:
            texts[name] = request.match_info[name]
        try:
            return msgspec.convert({name: self._readers[name](text) for name, text in texts.items()}, self._kind)
        except ValueError as error:
            raise self._refused(texts, error) from error

    def _texts(self, query: Mapping[str, str]) -> dict[str, str]:
        texts: dict[str, str] = {}
        for name, text in query.items():
            if name not in self._in_query:
                if self._ignores_unknown:
                    continue
                raise InvalidRequest(f"unknown parameter {name!r}{did_you_mean(name, self._in_query)}", parameter=name)
            if name in texts:
                raise InvalidRequest(f"parameter {name!r} is given twice", parameter=name)
            texts[name] = text
        return texts

    def _refused(self, texts: Mapping[str, str], error: ValueError) -> InvalidRequest:
        if missing := _MISSING.fullmatch(str(error)):
            name = missing[1]
            described = self._fields[name].description
            return InvalidRequest(f"the parameter {name} is missing{described and f': {described}'}", parameter=name)
        if (found := _AT.fullmatch(str(error))) is None:
            return InvalidRequest(f"the parameters are not {_AS_DESCRIBED}: {error}")
        name = found[1]
        shown = texts[name][:_SHOWN_CHARS]
        return InvalidRequest(f"{name} {shown!r} must be {self._fields[name].required()}", parameter=name)


class Body:
    """The body of one call, in JSON. `kind`: a struct, or another type. A struct may have a text `EXPECTED`, which
    precedes errors and states what to send. `shows_values`: errors have the beginning of a wrong value; not so for
    bodies that may have secrets or messages.
    """

    def __init__(self, kind: Any, *, shows_values: bool = True) -> None:
        self._decoder, self._shows_values = msgspec.json.Decoder(kind), shows_values
        is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        self._fields = _fields(kind) if is_struct else {}
        self._expected: str = getattr(kind, "EXPECTED", "")

    def of(self, data: bytes) -> Any:
        """An instance of `kind`. Raises InvalidRequest: it is not JSON, or does not fit the type."""
        try:
            return self._decoder.decode(data)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            problem, field = self._problem(data, error)
            message = f"{self._expected}: {problem}" if self._expected else problem
            facts = {"field": field} if field else {}
            raise InvalidRequest(message, **facts) from error

    def _problem(self, data: bytes, error: Exception) -> tuple[str, str]:
        """What is wrong, and the name of the field, if it is one."""
        if not isinstance(error, msgspec.ValidationError):
            return f"the body is not JSON: {error}", ""
        text = str(error)
        if text.startswith("Expected `object`, got") and not _AT.fullmatch(text):
            return "the body must be a JSON object", ""
        if unknown := _UNKNOWN.fullmatch(text):
            name = unknown[1][:_SHOWN_CHARS]
            return f"unknown field {name!r}{did_you_mean(name, list(self._fields))}", name
        if missing := _MISSING.fullmatch(text):
            return f"the field {missing[1]} is missing", missing[1]
        found = _AT.fullmatch(text)
        name, further = (found[1], found[2]) if found else ("", "")
        if name in self._fields and not further:
            shown = _shown_field(data, name) if self._shows_values else ""
            return f"{name}{shown} must be {self._fields[name].required()}", name
        return f"the body is not {_AS_DESCRIBED}: {text}", name


def names_in(path: str) -> list[str]:
    """The parameters of a path such as `/v1/streams/{name}`."""
    return re.findall(r"\{(\w+)", path)


class _Field(NamedTuple):
    """Of a struct. `written`: its type as the source has it."""

    type: inspect.Type
    written: Any

    def required(self) -> str:
        """What a value must be."""
        plain = _alternatives(self.type)
        if all(isinstance(one, inspect.StrType) for one in plain):
            return self.description or _named(plain[0], self.written)
        return " or ".join(_named(one, self.written) for one in plain)

    @property
    def description(self) -> str:
        schema = self.type.extra_json_schema if isinstance(self.type, inspect.Metadata) else None
        return str((schema or {}).get("description", ""))


def _fields(kind: type[Any]) -> dict[str, _Field]:
    return {
        field.encode_name: _Field(inspect.type_info(field.type), field.type) for field in msgspec.structs.fields(kind)
    }


def _shown_field(data: bytes, name: str) -> str:
    """The value of a field of a body that was refused."""
    try:
        return " " + repr(json.loads(data)[name])[:_SHOWN_CHARS]
    except (ValueError, RecursionError):  # such as a number with thousands of digits
        return ""


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    """The types of a union, without descriptions and without None."""
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [one for among in kind.types for one in _alternatives(among)]
    return [] if isinstance(kind, inspect.NoneType) else [kind]


def _reader(kind: inspect.Type) -> Callable[[str], object]:
    """How the text of a parameter becomes a value. A text that does not look like one stays a text, which its type then
    refuses.
    """
    for one in _alternatives(kind):
        match one:
            case inspect.IntType():
                return lambda text: int(text) if _WHOLE.fullmatch(text.strip()) else text
            case inspect.BoolType():
                return lambda text: {"true": True, "false": False}.get(text, text)
            case inspect.VarTupleType():
                return lambda text: text.split(",") if text else []
    return str


def _named(kind: inspect.Type, written: Any) -> str:
    match kind:
        case inspect.IntType(ge=int(low), le=int(high)):
            return f"a whole number from {low} to {high}"
        case inspect.IntType(ge=low):
            return "a whole number" if low is None else f"a whole number of at least {low}"
        case inspect.FloatType():
            return "a number"
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType():
            return ", ".join(map(str, _literals(written)))
        case inspect.StrType(pattern=str(pattern)):
            return f"a string that matches {pattern}"
        case inspect.StrType(min_length=None, max_length=None):
            return "a string"
        case inspect.StrType(min_length=low, max_length=high):
            return f"a string of {low or 0} to {high} characters"
        case inspect.ListType() | inspect.VarTupleType():
            return "a list"
    return _AS_DESCRIBED


def _literals(written: Any) -> list[Any]:
    """The values of the literals in a type, in the order of the source."""
    if get_origin(written) is Literal:
        return list(get_args(written))
    return [value for part in get_args(written) for value in _literals(part)]
