"""Addresses of brokers as operators write them: `http://host:port`, without credentials; and URLs as they are shown."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from natslog.errors import InvalidRequest

MAX_URL_CHARS = 512
_DEFAULT_PORTS = {"http": 80, "https": 443}


def normal_url(text: str) -> str:
    """The same text for the same address: lower case, no default port, no slash at the end.

    Raises:
        InvalidRequest: it is not the address of a broker, with the reason.
    """
    shown = without_secrets(text)
    if len(text) > MAX_URL_CHARS or not text.isascii() or not text.isprintable() or " " in text:
        raise InvalidRequest(f"{shown[:80]!r} is not the URL of a broker: write http://host:9292")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:  # its text may quote a part of a password
        raise InvalidRequest(
            f"{shown!r} is not the URL of a broker: host or port is wrong; write http://host:9292"
        ) from None
    if parts.scheme not in _DEFAULT_PORTS:
        raise InvalidRequest(f"{shown!r} is not the URL of a broker: it must begin with http:// or https://")
    if not parts.hostname:
        raise InvalidRequest(f"{shown!r} is not the URL of a broker: it names no host; write http://host:9292")
    if "@" in parts.netloc:
        host = parts.netloc.rpartition("@")[2]
        raise InvalidRequest(f"the URL of a broker must not contain credentials: write {parts.scheme}://{host}")
    if parts.query or parts.fragment or "?" in text or "#" in text:
        raise InvalidRequest(f"{shown!r} is not the URL of a broker: it must end after host and port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    shown_port = "" if port in (None, _DEFAULT_PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{host}{shown_port}{parts.path.rstrip('/')}"


_NEXT_URL = re.compile(r",(?=\s*[A-Za-z][A-Za-z0-9+.-]*://)")


def without_secrets(urls: str) -> str:
    """One URL, or several with commas between them, without user and password: to be shown and logged."""
    return ",".join(map(_without_user, separate_urls(urls)))


def separate_urls(urls: str) -> list[str]:
    """Of a text with commas between URLs; a password may contain a comma."""
    return _NEXT_URL.split(urls)


def _without_user(url: str) -> str:
    """Nothing before the last `@` is shown: a password that is not encoded may contain any other character."""
    before, separator, rest = url.partition("://")
    scheme, rest = (before + separator, rest) if separator else ("", url)
    return f"{scheme}…@{rest.rpartition('@')[2]}" if "@" in rest else url
