"""The secrets of this machine that may occur in texts: from files, URLs and variables. They leave this process in no
form; `Redactor` removes them from everything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from urllib.parse import unquote

from natslog.client import ClientOptions
from natslog.config import SETTINGS, BrokerConfig
from natslog.setting_kinds import File, Url
from natslog.urls import separate_urls

_MOST_BYTES = 256 * 1024
_FILES = [one.field for one in SETTINGS if isinstance(one.setting, File) and one.setting.is_secret]
_URLS = [one.field for one in SETTINGS if isinstance(one.setting, Url)]
_SECRET_VARIABLE = re.compile(
    r"SECRET|TOKEN|PASSW|PWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|NKEY|SEED", re.IGNORECASE
)
_HEADERS_VARIABLE = re.compile(r"^OTEL_\w*HEADERS$")
_URL_VARIABLE = re.compile(r"_URL$|^NATSLOG_SERVER$|^OTEL_\w*ENDPOINT$")
_PATH_VARIABLE = re.compile(r"_FILE$|_PATH$|_DIR$|^PWD$|^OLDPWD$", re.IGNORECASE)


def known_secrets(config: BrokerConfig | None, options: ClientOptions, environ: Mapping[str, str]) -> Iterator[str]:
    """Each line of each file, users, passwords and queries of URLs, and values of variables whose names sound like
    secrets, or which have headers of OpenTelemetry.
    """
    files = [options.token_file, options.tls_key_file]
    urls = [value for name, value in environ.items() if _URL_VARIABLE.search(name)]
    if config is not None:
        files += [getattr(config, name) for name in _FILES]
        urls += filter(None, (getattr(config, name) for name in _URLS))
    for path in filter(None, files):
        yield from _lines_of(path)
    for url in (one for text in urls for one in separate_urls(text)):
        login = url.partition("://")[2].rpartition("@")[0]
        user, _, password = login.partition(":")
        yield from {login, password or user, unquote(password or user)}
        yield from _values_of(url.partition("?")[2], "&")
    for name, value in environ.items():
        if _SECRET_VARIABLE.search(name) and not _PATH_VARIABLE.search(name):
            yield value
        if _HEADERS_VARIABLE.search(name):
            yield from _values_of(value, ",")
    if options.token is not None:
        yield options.token


def _values_of(pairs: str, separator: str) -> Iterator[str]:
    """All pairs `name=value` together, and each value; of what is no pair, all."""
    yield pairs
    for pair in pairs.split(separator):
        value = pair.partition("=")[2] or pair
        yield from {value.strip(), unquote(value).strip()}


def _lines_of(path: str) -> Iterator[str]:
    with suppress(OSError):  # it is missing, or of another user: then it is not sent by this process either
        with open(path, errors="replace") as file:
            for line in file.read(_MOST_BYTES).splitlines():
                if not line.startswith(("-----", "***", "NKEY Seed", "#")):
                    yield line.strip()
