"""Settings stated once: what each field of a structure of settings does, what is valid, and how it is written.

A structure annotates its fields: `max_age_s: Annotated[float | None, Duration("Delete …", null=None)] = None`. What
reads, shows and describes settings follows from these annotations (`stated_settings`): parsers, options of commands,
bodies of requests, and the tables in docs/SETTINGS.md. To add a setting, add a field.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from natslog.errors import InvalidRequest
from natslog.subjects import MAX_NAME_CHARS, NAME_PATTERN, check_name
from natslog.units import format_duration, format_exact_size, parse_duration_s, parse_size_bytes

NOT_NULL: Any = object()
"""Of a setting that always has a value."""
NAME_TYPE: Any = Annotated[str, Meta(pattern=f"^{NAME_PATTERN}$", max_length=MAX_NAME_CHARS)]
_ZERO = (0, "0", "0.0")


@dataclass(frozen=True, slots=True)
class Setting:
    """How a setting is written: as text. The other kinds are derived from this one.

    Attributes:
        help: what it does, in a sentence. null: the value of the field that null in JSON, and the text `none`, stand
            for. flag: the name of its option, where that does not follow from the name of the setting.
    """

    help: str
    _: KW_ONLY
    null: Any = NOT_NULL
    flag: str = ""

    def parse(self, value: Any, name: str) -> Any:
        """The value of the field, from one of a JSON body or a TOML file.

        Raises:
            InvalidRequest: it is not valid; the message names the valid ones.
        """
        return self.null if value is None and self.is_nullable else self._parsed(value, name)

    def from_text(self, text: str, name: str) -> Any:
        """The value in JSON, from the text of an option or a variable. Raises InvalidRequest."""
        return None if text == "none" and self.is_nullable else text

    def shown(self, value: Any) -> Any:
        """The value in JSON, from that of the field."""
        return value

    @property
    def is_nullable(self) -> bool:
        return self.null is not NOT_NULL

    @property
    def json_type(self) -> Any:
        """Of the value in JSON, without null."""
        return str

    @property
    def option_type(self) -> Any:
        """Of the value as the command line has it."""
        return str

    @property
    def valid(self) -> str:
        """The valid values, for the documentation."""
        return "text"

    def _parsed(self, value: Any, name: str) -> Any:
        if not isinstance(value, str):
            raise InvalidRequest(f"{name} must be text, not {_kind_of(value)}", setting=name)  # it may have a password
        return value


def _kind_of(value: Any) -> str:
    """In place of a value that may be a secret."""
    return {list: "a list", dict: "a table", bool: "true or false", type(None): "null", str: "text"}.get(
        type(value), "a number"
    )


class Url(Setting):
    """A URL, or several with commas between them."""


@dataclass(frozen=True, slots=True)
class File(Setting):
    """The path of a file. `is_secret`: what the file contains."""

    _: KW_ONLY
    is_secret: bool = False


class Duration(Setting):
    """Text such as `7d`, or seconds. The name of its field ends in `_s`, that of the setting does not.

    With `null=0.0`, 0 is the same as null.
    """

    json_type = float | str
    valid = "duration"

    def shown(self, value: float | None) -> str | None:
        return None if value is None or value == self.null else format_duration(value)

    def _parsed(self, value: Any, name: str) -> float:
        return 0.0 if self.null == 0.0 and value in _ZERO else parse_duration_s(value, name)


@dataclass(frozen=True, slots=True)
class Size(Setting):
    """Text such as `10GiB`, or bytes."""

    _: KW_ONLY
    at_least: int = 1
    json_type = int | str

    @property
    def valid(self) -> str:
        return f"size, from {format_exact_size(self.at_least)}" if self.at_least > 1 else "size"

    def _parsed(self, value: Any, name: str) -> int:
        size_bytes = parse_size_bytes(value, name)
        if size_bytes < self.at_least:
            raise InvalidRequest(f"{name} must be at least {format_exact_size(self.at_least)}", setting=name)
        return size_bytes


@dataclass(frozen=True, slots=True)
class Whole(Setting):
    """A whole number."""

    low: int
    high: int

    def from_text(self, text: str, name: str) -> int | None:
        if text == "none" and self.is_nullable:
            return None
        if not text.isdecimal():
            raise InvalidRequest(f"{name} {text!r} must be a whole number{' or none' if self.is_nullable else ''}")
        return int(text)

    @property
    def json_type(self) -> Any:
        return Annotated[int, Meta(ge=self.low, le=self.high)]

    @property
    def option_type(self) -> Any:
        return str if self.null is None else int

    @property
    def valid(self) -> str:
        return f"{self.low:,} to {self.high:,}" if self.high < 2**31 else f"{self.low:,} or more"

    def _parsed(self, value: Any, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            raise InvalidRequest(f"{name} {value!r} must be a whole number from {self.low} to {self.high}")
        return value


@dataclass(frozen=True, slots=True)
class Choice(Setting):
    """One of the words of a `Literal`."""

    literal: Any

    @property
    def words(self) -> tuple[str, ...]:
        return get_args(self.literal)

    def from_text(self, text: str, name: str) -> str | None:
        return None if text == "none" and self.is_nullable and "none" not in self.words else text

    @property
    def json_type(self) -> Any:
        return self.literal

    @property
    def valid(self) -> str:
        return f"{', '.join(self.words[:-1])} or {self.words[-1]}"

    def _parsed(self, value: Any, name: str) -> str:
        if value not in self.words:
            raise InvalidRequest(f"{name} {value!r} must be {self.valid}", setting=name)
        return str(value)


class Flag(Setting):
    """True or false."""

    json_type = bool
    option_type = bool
    valid = "true or false"

    def from_text(self, text: str, name: str) -> bool:
        try:
            return msgspec.convert(text, bool, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{name} {text!r} must be true or false", setting=name) from error

    def _parsed(self, value: Any, name: str) -> bool:
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name} {value!r} must be true or false", setting=name)
        return value


class Name(Setting):
    """A name, as those of streams are."""

    json_type = NAME_TYPE
    valid = "name"

    def _parsed(self, value: Any, name: str) -> str:
        return check_name(value, name)


class Texts(Setting):
    """Several texts; commas separate them where they are given as one."""

    valid = "list"

    def from_text(self, text: str, name: str) -> list[str]:
        return [one.strip() for one in text.split(",") if one.strip()]

    def shown(self, value: tuple[str, ...]) -> list[str]:
        return list(value)

    def _parsed(self, value: Any, name: str) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise InvalidRequest(f"{name} must be a list of texts, not {_kind_of(value)}", setting=name)
        return tuple(value)


class Urls(Texts):
    """URLs."""


@dataclass(frozen=True, slots=True)
class Tags(Texts):
    """Several names; the option is given once for each. `what`: one of them, in messages."""

    most: int
    what: str
    option_type = list[str]

    @property
    def json_type(self) -> Any:
        return Annotated[list[NAME_TYPE], Meta(max_length=self.most)]

    def _parsed(self, value: Any, name: str) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or len(value) > self.most:
            raise InvalidRequest(f"{name} must be a list of at most {self.most} tags", setting=name)
        return tuple(dict.fromkeys(check_name(one, self.what) for one in value))


@dataclass(frozen=True, slots=True)
class Stated:
    """A setting as a structure states it. `name`: in JSON, files and options. `field`: of the structure."""

    name: str
    field: str
    setting: Setting
    default: Any


def stated_settings(struct: type[msgspec.Struct]) -> tuple[Stated, ...]:
    """The settings that the fields of a structure are annotated with, in their order."""
    found = []
    for field in msgspec.structs.fields(struct):
        for setting in get_args(field.type)[1:]:
            if isinstance(setting, Setting):
                name = field.name.removesuffix("_s") if isinstance(setting, Duration) else field.name
                found.append(Stated(name, field.name, setting, field.default))
    return tuple(found)
