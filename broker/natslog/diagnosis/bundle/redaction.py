"""Texts without secrets and, if wanted, without names.

Theory of operation. Two filters remove secrets from a text: the exact ones that are known on this machine, and forms
(tokens, keys, passwords in URLs, `password=…`, long random texts). Names and subjects can be replaced by digests: each
part between dots by one of its own, so that wildcards stay readable and a subject can be compared with its stream. The
key of the digests is made for one archive and is not in it: names cannot be found by trying. In texts for people, names
are not marked; there every word is replaced that does not occur in natslog's own source.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

import natslog

REMOVED = "[removed]"
MOST_CHARS = 2_000
_READ, _CUT_CHARS = 4, 1_000
_LEAST_SECRET_CHARS = 6
_PEM = re.compile(r"-----BEGIN [A-Z ]{0,40}-----.*?(?:-----END [A-Z ]{0,40}-----|\Z)", re.DOTALL)
_NAMED_SECRET = (
    r"[\w.-]{0,40}(?:password|passwd|passphrase|pwd|secret|token|credential|creds|nkey|seed|authorization|"
    r"private[_-]?key|access[_-]?key|api[_-]?key|signature|cookie)[\w.-]{0,40}"
)
_FORMS = tuple(
    (re.compile(form, re.IGNORECASE), shown)
    for form, shown in (
        (r"([a-z][a-z0-9+.-]{0,30}://)(?:(?!://)[^\n\"'])*@", rf"\1{REMOVED}@"),
        (
            rf"(?<![\w.-])({_NAMED_SECRET}[\"']?\s*[=:]\s*)(?:bearer\s+|basic\s+)?(\"[^\"]*\"|'[^']*'|[^\s,;]+)",
            rf"\1{REMOVED}",
        ),
        (r"\b(bearer|basic)\s+[\w.~+/=-]{6,}", rf"\1 {REMOVED}"),
        (r"\bnlt_[0-9a-f]{12}_[\w-]+", REMOVED),
        (r"\beyJ[\w-]+(?:\.[\w-]+)*", REMOVED),
        (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", REMOVED),
        (r"\b[SP][AUOCNX][A-Z2-7]{40,}\b", REMOVED),
        (r"(?<![\w/+.-])[\w/+-]{40,}={0,2}(?![\w/+.-])", REMOVED),
    )
)
_WORD = re.compile(r"[^\s.,:;'\"()\[\]{}<>=/*|?!…`]+")
_PART = re.compile(r"[^.*>]+")
_NUMBER = re.compile(r"[+-]?\d[\d_,%-]*(?:T\d\d|[a-zA-Z]{0,3})|[0-9a-f]{16}|[0-9a-f]{32}")  # or a time, or an id
_OWN_NAME = re.compile(r"__\w+")


class Redactor:
    """Args: `known`: secrets of this machine. `hashes_names`: names and subjects are replaced by digests."""

    def __init__(self, known: Iterable[str], *, hashes_names: bool) -> None:
        texts = {text for text in known if len(text) >= _LEAST_SECRET_CHARS}
        self._known = sorted(texts, key=len, reverse=True)  # one may be a part of another
        self._key = secrets.token_bytes(32)
        self._names: set[str] = set()
        self.hashes_names = hashes_names

    def add_names(self, names: Iterable[str]) -> None:
        """Names and subjects that occur in texts."""
        self._names |= {part for name in names for part in _PART.findall(name)}

    # ---- by kind ----

    def text(self, text: str, most_chars: int = MOST_CHARS) -> str:
        """A text for people. The end of a text that is too long is not read: it may be a part of a secret."""
        shown = self.without_secrets(text[: _READ * most_chars])
        if len(text) > _READ * most_chars:
            shown = shown[:-_CUT_CHARS] + " …"
        if self.hashes_names:
            shown = _WORD.sub(lambda found: self._word(found[0]), shown)
        return shown if len(shown) <= most_chars else shown[:most_chars] + " …"

    def name(self, name: str) -> str:
        """A name or a subject. Those of natslog's own streams stay."""
        shown = self.without_secrets(name) if len(name) <= MOST_CHARS else REMOVED
        if not self.hashes_names or _OWN_NAME.fullmatch(shown):
            return shown
        return _PART.sub(lambda found: self._digest(found[0]), shown)

    def url(self, url: str) -> str:
        """Scheme, host and port. With digests of names, the host is one."""
        if len(url) > MOST_CHARS:
            return REMOVED
        try:
            parts = urlsplit(url.strip())
            host, port = parts.hostname or "", parts.port
        except ValueError:
            return REMOVED
        host = self.without_secrets(host)
        shown = self._digest(host) if self.hashes_names and not _is_address(host) else host
        return f"{self.without_secrets(parts.scheme)[:20]}://{shown[:255]}" + ("" if port is None else f":{port}")

    def without_secrets(self, text: str) -> str:
        shown = self.without_known(_PEM.sub(REMOVED, text))
        for form, replacement in _FORMS:
            shown = form.sub(replacement, shown)
        return shown

    def without_known(self, text: str) -> str:
        for secret in self._known:
            text = text.replace(secret, REMOVED)
        return text

    # ---- digests ----

    def _word(self, word: str) -> str:
        if word in self._names:
            return self._digest(word)
        is_plain = word in REMOVED or _NUMBER.fullmatch(word) or _OWN_NAME.fullmatch(word)
        return word if is_plain or word.lower() in self._vocabulary else self._digest(word)

    def _digest(self, text: str) -> str:
        return "h" + hmac.digest(self._key, text.encode(errors="replace"), hashlib.sha256).hex()[:12]

    @cached_property
    def _vocabulary(self) -> frozenset[str]:
        """The words of natslog's source, and the punctuation that `_WORD` takes for words."""
        found: set[str] = {"-", "→", "–", "%", "$", "#", "@", "+", "&"}
        for path in Path(natslog.__file__).parent.rglob("*.py"):
            found.update(_WORD.findall(path.read_text().lower()))
        return frozenset(found)


def _is_address(host: str) -> bool:
    return host == "localhost" or re.fullmatch(r"[0-9.]+|[0-9a-fA-F:]+", host) is not None
