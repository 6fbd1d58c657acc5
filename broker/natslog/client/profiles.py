"""Profiles: named sets of servers and credentials, in `~/.config/natslog/config.toml` (or `$NATSLOG_CONFIG`).

    default = "prod"

    [profiles.prod]
    servers = ["https://a.example:9292", "https://b.example:9292"]
    token_file = "prod.token"
    tls_ca_file = "ca.pem"

Paths are relative to the folder of the file. The file itself holds no secrets.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import msgspec

from natslog.errors import ConfigError, did_you_mean


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client uses where nothing else is given."""

    servers: tuple[str, ...] = ()
    token_file: str | None = None
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None


class _Profiles(msgspec.Struct, forbid_unknown_fields=True):
    profiles: dict[str, Profile] = {}
    default: str | None = None


_FILES = tuple(name for name in Profile.__struct_fields__ if name.endswith("_file"))


def profiles_path() -> Path:
    if (given := os.environ.get("NATSLOG_CONFIG")) is not None:
        return Path(given)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "natslog" / "config.toml"


def load_profile(name: str | None) -> Profile:
    """The profile of this name; without a name, the default one; an empty one where there is no file, or no default.

    Raises:
        ConfigError: there is no such profile (the nearest one is named), or the file is wrong.
    """
    path = profiles_path()
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        if name is None:
            return Profile()
        raise ConfigError(f"there is no profile {name!r}, because there is no file {path}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the profiles in {path}: {error.strerror}") from error
    try:
        found = msgspec.convert(tomllib.loads(text.decode()), _Profiles)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} does not contain profiles as natslog expects them: {error}") from error
    wanted = name if name is not None else found.default
    if wanted is None:
        return Profile()
    if wanted not in found.profiles:
        near = did_you_mean(wanted, tuple(found.profiles)) if found.profiles else ""
        raise ConfigError(f"there is no profile {wanted!r} in {path}{near}")
    return _with_paths(found.profiles[wanted], path.parent)


def _with_paths(profile: Profile, folder: Path) -> Profile:
    given = {name: file for name in _FILES if (file := getattr(profile, name)) is not None}
    paths = {name: str(folder / Path(file).expanduser()) for name, file in given.items()}
    return msgspec.structs.replace(profile, **paths)
