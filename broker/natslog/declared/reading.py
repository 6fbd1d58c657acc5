"""Files of declared streams, checked as far as that is possible without a cluster.

[defaults]                    # settings of each stream of this file that does not state them itself
managed_by = "shop"
replicas = 3

[streams.orders]              # a name with dots is quoted: [streams."orders.eu"]
subjects = ["orders.>"]
max_age = "7d"                # "none": no limit
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from natslog.errors import ConfigError, InvalidRequest, did_you_mean
from natslog.model import SETTINGS
from natslog.stream_settings import SETTING_NAMES, parsed_fields
from natslog.subjects import check_name, is_internal

STANDARD_INPUT = "-"
_OF_ONE_STREAM = ("subject", "subjects")
_REMOVABLE = {one.name for one in SETTINGS if one.setting.is_nullable and one.setting.shown(one.setting.null) is None}
"""Settings that may be "none"."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    defaults: dict[str, Any] = {}
    streams: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Declared:
    """What all files together state.

    Attributes:
        streams: the stated settings of each, in the form of the API. managed_by: all values of that setting, also in
            the defaults of a file without streams: `--prune` deletes streams that have one of them.
    """

    streams: Mapping[str, Mapping[str, Any]]
    managed_by: frozenset[str]


def read_files(paths: Sequence[str]) -> Declared:
    """The streams of these files; `-` is standard input.

    Raises:
        ConfigError: names the file, and the key with its path, or the line.
    """
    streams: dict[str, dict[str, Any]] = {}
    found_in: dict[str, str] = {}
    managed_by: set[str] = set()
    for path in dict.fromkeys(paths):
        shown = "standard input" if path == STANDARD_INPUT else path
        file = _parsed(_text(path, shown), shown)
        defaults = _checked(file.defaults, f"{shown}: defaults")
        for name, given in file.streams.items():
            if name in found_in:
                raise ConfigError(f"{shown}: stream {name!r} is declared in {found_in[name]}, too: remove one of both")
            streams[name], found_in[name] = defaults | _stream(name, given, shown), shown
        managed_by |= _names((defaults, *streams.values()))
    return Declared(streams, frozenset(managed_by))


def _text(path: str, shown: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == STANDARD_INPUT else Path(path).read_bytes()
        return data.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {shown}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown} is not UTF-8 text: {error}") from error


def _parsed(text: str, shown: str) -> _File:
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{shown} is not TOML: {error}") from error
    known = _File.__struct_fields__
    for name in document:
        if name not in known:
            raise ConfigError(f"{shown}: unknown key {name!r}{did_you_mean(name, known)}")
    try:
        return msgspec.convert(document, _File)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{shown}: defaults and streams are tables: {error}") from error


def _stream(name: str, given: Any, shown: str) -> dict[str, Any]:
    where = f"{shown}: streams.{name}"
    try:
        check_name(name)
    except InvalidRequest as error:
        raise ConfigError(f"{where}: {error.message}") from error
    if is_internal(name):
        raise ConfigError(f"{where}: names that begin with '__' are those of streams that natslog itself writes")
    if not isinstance(given, dict):
        raise ConfigError(f"{where} must be a table of settings, as in [streams.{name}]")
    return _checked(given, where, is_stream=True)


def _checked(given: dict[str, Any], where: str, *, is_stream: bool = False) -> dict[str, Any]:
    """The settings of a table, each of them valid by itself."""
    known = [name for name in SETTING_NAMES if is_stream or name not in _OF_ONE_STREAM]
    for name, value in given.items():
        if name not in known:
            hint = did_you_mean(name, known)
            if isinstance(value, dict) and is_stream:
                hint = f'. If this is a part of the name of a stream, quote the name: [streams."….{name}"]'
            raise ConfigError(f"{where}.{name}: unknown setting {name!r}{hint}")
    settings = {name: None if value == "none" and name in _REMOVABLE else value for name, value in given.items()}
    for name, value in settings.items():
        _check({name: value}, f"{where}.{name}")
    _check(settings, where)
    return settings


def _check(settings: dict[str, Any], where: str) -> None:
    try:
        parsed_fields(settings)
    except InvalidRequest as error:
        raise ConfigError(f"{where}: {error.message}") from error


def _names(all_settings: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for settings in all_settings if (name := settings.get("managed_by")) is not None}
