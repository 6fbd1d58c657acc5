"""Names and subjects: what is allowed, and which subjects a wildcard covers.

Source: NATS documentation, "Subject-Based Messaging": tokens between dots, `*` stands for one token, `>` as the last
token for one or more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from natslog.errors import InvalidRequest

MAX_NAME_CHARS = 255
INTERNAL_PREFIX = "__"
"""Names of streams that natslog itself writes begin so."""
MAX_SUBJECT_BYTES = 1024

NAME_PATTERN = r"[A-Za-z0-9_](?:\.?[A-Za-z0-9_-])*"
_NAME = re.compile(NAME_PATTERN)
_FORBIDDEN = re.compile(r"[\s\x00-\x1f\x7f]")


def is_internal(stream: str) -> bool:
    """Whether natslog itself writes the stream: users can read it, and cannot change it."""
    return stream.startswith(INTERNAL_PREFIX)


def check_name(name: object, what: str = "stream name") -> str:
    """The name itself, if it can name a stream, group or consumer.

    Raises:
        InvalidRequest: empty, too long, or with characters other than letters, digits, `_`, `-` and single dots.
    """
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"a {what} must not be empty")
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(f"a {what} has at most {MAX_NAME_CHARS} characters; this one has {len(name)}")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{what} {name!r} is not allowed: use letters, digits, '_', '-' and single dots inside, starting with a "
            "letter, digit or '_'"
        )
    return name


def check_subject(subject: object, *, wildcards: bool, what: str = "subject") -> str:
    """The subject itself, if it is valid in NATS.

    Args:
        wildcards: whether `*` and `>` may stand as tokens (a subscription) or not (a publish).

    Raises:
        InvalidRequest: empty, too long, with spaces or control characters, an empty token, or a misplaced wildcard.
    """
    if not isinstance(subject, str) or not subject:
        raise InvalidRequest(f"a {what} must not be empty")
    if len(subject.encode("utf-8", "surrogatepass")) > MAX_SUBJECT_BYTES:
        raise InvalidRequest(f"a {what} has at most {MAX_SUBJECT_BYTES} bytes")
    if _FORBIDDEN.search(subject):
        raise InvalidRequest(f"{what} {subject!r} has a space or control character")
    try:
        subject.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what} {subject!r} is not valid Unicode") from error
    tokens = subject.split(".")
    if "" in tokens:
        raise InvalidRequest(
            f"{what} {subject!r} has an empty token: remove dots at the beginning or end and repeated dots"
        )
    for position, token in enumerate(tokens):
        if not wildcards and token in ("*", ">"):
            raise InvalidRequest(
                f"{what} {subject!r} contains a wildcard; a message is published to one subject without wildcards"
            )
        if wildcards and token == ">" and position != len(tokens) - 1:
            raise InvalidRequest(f"{what} {subject!r}: '>' may only be the last token")
        if wildcards and len(token) > 1 and ("*" in token or ">" in token):
            raise InvalidRequest(
                f"{what} {subject!r}: a wildcard must be a whole token, as in 'orders.*' or 'orders.>'"
            )
    return subject


def is_wildcard(token: str) -> bool:
    return token in ("*", ">")


def has_wildcard(subject: str) -> bool:
    return any(map(is_wildcard, subject.split(".")))


def overlap(one: str, other: str) -> bool:
    """Whether there is a plain subject that both wildcards (or plain subjects) cover."""
    ours, theirs = one.split("."), other.split(".")
    for mine, its in zip(ours, theirs, strict=False):
        if ">" in (mine, its):
            return True
        if mine != its and not (is_wildcard(mine) or is_wildcard(its)):
            return False
    return len(ours) == len(theirs)


def includes(pattern: str, other: str) -> bool:
    """Whether a wildcard (or plain subject) covers every subject that another one covers."""
    ours, theirs = pattern.split("."), other.split(".")
    for at, mine in enumerate(ours):
        if at >= len(theirs):
            return False
        if mine == ">":
            return True
        if theirs[at] == ">" or (mine != "*" and mine != theirs[at]):
            return False
    return len(ours) == len(theirs)


def covers(pattern: str, subject: str) -> bool:
    """Whether a wildcard (or plain subject) covers a plain subject."""
    return re.fullmatch(wildcard_regex(pattern), subject) is not None


def cover(patterns: Iterable[str], subject: str) -> bool:
    """Whether one of the wildcards (or plain subjects) covers a plain subject."""
    return any(covers(pattern, subject) for pattern in patterns)


class SubjectTree:
    """Wildcards and plain subjects, each of one owner or several: a lookup follows their tokens, so that its cost does
    not depend on their number.
    """

    def __init__(self, patterns: Iterable[str] = (), owner: str = "") -> None:
        self._root: dict[str, Any] = {}
        for pattern in patterns:
            self.add(pattern, owner)

    def add(self, pattern: str, owner: str) -> None:
        node = self._root
        for token in pattern.split("."):
            node = node.setdefault(token, {})
        node.setdefault("", set()).add(owner)  # a subject ends here; no token is empty

    def remove(self, pattern: str, owner: str) -> None:
        """One that was added."""
        path = [self._root]
        tokens = pattern.split(".")
        for token in tokens:
            path.append(path[-1][token])
        path[-1][""].discard(owner)
        if not path[-1][""]:
            del path[-1][""]
        for node, token in reversed(list(zip(path, tokens, strict=False))):
            if not node[token]:
                del node[token]

    def covers(self, subject: str) -> bool:
        """Whether one of them covers a plain subject."""
        nodes = [self._root]
        for token in subject.split("."):
            if any(">" in node for node in nodes):
                return True
            nodes = [node[one] for node in nodes for one in (token, "*") if one in node]
        return any("" in node for node in nodes)

    def overlapping(self, pattern: str) -> set[str]:
        """The owners of those that overlap this wildcard or plain subject (`overlap`)."""
        found, nodes = set[str](), [self._root]
        for token in pattern.split("."):
            for node in nodes:
                if token == ">":
                    found |= _owners_below(node)
                elif ">" in node:
                    found |= node[">"][""]
            nodes = [child for node in nodes for child in _children(node, token)]
        return found.union(*(node.get("", ()) for node in nodes))


def _children(node: dict[str, Any], token: str) -> list[dict[str, Any]]:
    """The nodes of the tokens that overlap this one, but for `>`."""
    if token == ">":
        return []
    if token == "*":
        return [child for name, child in node.items() if name not in ("", ">")]
    return [node[one] for one in (token, "*") if one in node]


def _owners_below(node: dict[str, Any]) -> set[str]:
    """Of all that have one token more than this node, or several."""
    found, nodes = set[str](), [child for name, child in node.items() if name]
    while nodes:
        one = nodes.pop()
        found |= one.get("", set())
        nodes += [child for name, child in one.items() if name]
    return found


def wildcard_regex(pattern: str) -> str:
    """An RE2 and Python regular expression that matches exactly the subjects a wildcard covers."""
    tokens = pattern.split(".")
    parts = [r"[^.]+" if token == "*" else re.escape(token) for token in tokens if token != ">"]
    tail = [r"[^.]+(?:\.[^.]+)*"] if tokens[-1] == ">" else []
    return "^" + r"\.".join(parts + tail) + "$"
