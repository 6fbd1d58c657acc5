"""What the metadata stores about security: tokens, roles, access rules and quotas.

A request is made by an *identity*, which is a name. A token belongs to an identity, and a client certificate names one.
An identity may have *roles*. A *rule* permits one action to an identity, to a role (`role:NAME`) or to every identity
(`*`), on the streams and subjects that its patterns match. What no rule permits is refused; no rule forbids anything.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

import msgspec

from natslog.errors import InvalidRequest
from natslog.subjects import MAX_NAME_CHARS, check_name, check_subject

Action = Literal["read", "publish", "manage", "cursor", "monitor", "admin"]
"""`read`: messages and positions. `publish`: direct appends. `manage`: create, edit, purge, seal and delete streams.
`cursor`: set and delete cursors. `monitor`: metrics. `admin`: the cluster, tokens and rules, and all other actions.
"""
ACTIONS: tuple[Action, ...] = get_args(Action)

ANONYMOUS = "anonymous"
"""The identity of requests without credentials. A rule may permit it something; `*` does not include it."""
ADMIN_ROLE = "admin"
EVERYONE = "*"
ROLE_PREFIX = "role:"
ALL_STREAMS, ALL_SUBJECTS = "*", ">"

MAX_TOKENS = 10_000
MAX_RULES = 1_000
MAX_ROLES = 10_000
MAX_QUOTAS = 1_000
MAX_IDENTITY_CHARS = 128
IDENTITY_PATTERN = rf"[A-Za-z0-9_](?:[A-Za-z0-9_.@:/=+-]{{0,{MAX_IDENTITY_CHARS - 2}}}[A-Za-z0-9_])?"
_IDENTITY = re.compile(IDENTITY_PATTERN)
_PATTERN_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-*?")


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A bearer token without its secret.

    Attributes:
        digest: SHA-256 of the secret, 64 hexadecimal digits. `expires_us`: None means never.
    """

    id: str
    identity: str
    digest: str
    created_us: int
    expires_us: int | None = None
    note: str = ""


class Rule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Permits `action` to `who`: an identity, `role:NAME`, or `*`.

    Attributes:
        stream: pattern of stream names (`*` any text, `?` one character). `subject`: a NATS wildcard.
    """

    id: str
    who: str
    action: Action
    stream: str = ALL_STREAMS
    subject: str = ALL_SUBJECTS

    @property
    def is_for_everything(self) -> bool:
        return (self.stream, self.subject) == (ALL_STREAMS, ALL_SUBJECTS)

    def __str__(self) -> str:
        return f"{self.id}: {self.who} may {self.action} stream {self.stream} subject {self.subject}"


class Quota(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of one identity; None is the broker's default. All but the last three are for each broker.

    Attributes:
        connections: open connections. `requests`: requests in progress. `polls`: requests that wait for messages.
        requests_per_s: requests a second. `bytes_in_per_s`, `bytes_out_per_s`: bytes of bodies a second.
        streams: streams that it created. `stored_bytes`: sum of the `max_bytes` of these streams, which must all have
            one. `cursors`: cursors that it set first.
    """

    connections: int | None = None
    requests: int | None = None
    polls: int | None = None
    requests_per_s: int | None = None
    bytes_in_per_s: int | None = None
    bytes_out_per_s: int | None = None
    streams: int | None = None
    stored_bytes: int | None = None
    cursors: int | None = None


QUOTA_NAMES = tuple(Quota.__struct_fields__)


class Security(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """All of it; a change makes another one.

    Attributes:
        tokens: by id. `rules`: by id, oldest first. `roles`: of each identity. `quotas`: by identity; `*`: of those
            without one of their own. `rules_made`: how many rules were ever added; ids are not used again.
    """

    tokens: dict[str, TokenRecord] = {}
    rules: dict[str, Rule] = {}
    roles: dict[str, tuple[str, ...]] = {}
    quotas: dict[str, Quota] = {}
    rules_made: int = 0


def quota_of(security: Security, identity: str) -> Quota:
    """Its own; else that of all identities, where there is one."""
    return security.quotas.get(identity) or security.quotas.get(EVERYONE) or Quota()


def check_identity(name: object) -> str:
    """The name itself, if it can name an identity: also an e-mail address, or the URI of a certificate.

    Raises:
        InvalidRequest.
    """
    if not isinstance(name, str) or not _IDENTITY.fullmatch(name) or name.startswith(ROLE_PREFIX):
        shown = name[:MAX_IDENTITY_CHARS] if isinstance(name, str) else name
        raise InvalidRequest(
            f"identity {shown!r} is not allowed: use 1 to {MAX_IDENTITY_CHARS} letters and digits, and inside also any "
            f"of _ - . @ : / = +; it must not begin with {ROLE_PREFIX!r}",
            field="identity",
        )
    return name


def check_role(name: object) -> str:
    """Raises InvalidRequest."""
    return check_name(name, "role")


def check_who(who: object) -> str:
    """The subject of a rule: an identity, a role, or everyone. Raises InvalidRequest."""
    if who == EVERYONE:
        return EVERYONE
    if isinstance(who, str) and who.startswith(ROLE_PREFIX):
        check_role(who.removeprefix(ROLE_PREFIX))
        return who
    return check_identity(who)


def check_action(action: object) -> Action:
    """Raises InvalidRequest."""
    for known in ACTIONS:
        if action == known:
            return known
    raise InvalidRequest(f"action {action!r} must be one of {', '.join(ACTIONS)}", field="action")


def check_stream_pattern(pattern: object) -> str:
    """Raises InvalidRequest."""
    if not isinstance(pattern, str) or not pattern:
        raise InvalidRequest("a pattern of stream names must not be empty", field="stream")
    if len(pattern) > MAX_NAME_CHARS or not set(pattern) <= _PATTERN_CHARS:
        raise InvalidRequest(
            f"pattern {pattern[:MAX_NAME_CHARS]!r} of stream names is not allowed: use at most {MAX_NAME_CHARS} "
            "letters, digits, '_', '-' and '.', and the wildcards '*' (any text) and '?' (one character)",
            field="stream",
        )
    return pattern


def check_subject_pattern(pattern: object) -> str:
    """Raises InvalidRequest."""
    return check_subject(pattern, wildcards=True, what="subject pattern")
