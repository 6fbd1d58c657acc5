"""Identities: tokens, access rules, roles, quotas, sessions."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from natslog.errors import InvalidRequest
from natslog.http.shapes.common import Name, NameText, Time
from natslog.security.records import (
    ALL_STREAMS,
    ALL_SUBJECTS,
    ANONYMOUS,
    IDENTITY_PATTERN,
    MAX_IDENTITY_CHARS,
    Action,
    check_identity,
    check_stream_pattern,
    check_subject_pattern,
    check_who,
)

_MAX_NOTE_CHARS = 200
_LEAST_BYTES_PER_S = 64 * 1024
_MAY_BE_NONE_AT_ALL = frozenset({"streams", "stored_bytes", "cursors", "polls"})

Identity = Annotated[str, Meta(pattern=f"^{IDENTITY_PATTERN}$", max_length=MAX_IDENTITY_CHARS)]
IdentityText = Annotated[
    str, Meta(extra_json_schema={"pattern": f"^{IDENTITY_PATTERN}$", "maxLength": MAX_IDENTITY_CHARS})
]
"""Checked by `check_identity`, which states the remedy."""
Quota = Annotated[int, Meta(ge=0)] | None


class AccessRule(msgspec.Struct):
    """Permits an action to an identity, to `role:NAME`, or to every identity (`*`)."""

    id: str
    who: str
    action: Action
    stream: str
    subject: str


class NewRule(msgspec.Struct, forbid_unknown_fields=True):
    """`stream`: a pattern of names. `subject`: a NATS wildcard. Both are everything by default."""

    who: str
    action: Action
    stream: str = ALL_STREAMS
    subject: str = ALL_SUBJECTS

    def __post_init__(self) -> None:
        check_who(self.who)
        check_stream_pattern(self.stream)
        check_subject_pattern(self.subject)
        if self.action == "monitor" and (self.stream, self.subject) != (ALL_STREAMS, ALL_SUBJECTS):
            raise InvalidRequest("monitor is for the whole cluster: leave out stream and subject", field="stream")


class Quotas(msgspec.Struct):
    """Limits of an identity; null: none. The last three are for the cluster, the others for each broker."""

    connections: Quota
    requests: Quota
    polls: Quota
    requests_per_s: Quota
    bytes_in_per_s: Quota
    bytes_out_per_s: Quota
    streams: Quota
    stored_bytes: Quota
    cursors: Quota


class NewQuotas(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of an identity; what is not given, or null, has its default."""

    connections: Quota = None
    requests: Quota = None
    polls: Quota = None
    requests_per_s: Quota = None
    bytes_in_per_s: Quota = None
    bytes_out_per_s: Quota = None
    streams: Quota = None
    stored_bytes: Quota = None
    cursors: Quota = None

    def check(self) -> None:
        """Raises InvalidRequest: one is too small to be of use, or too large to be stored."""
        for name, value in msgspec.structs.asdict(self).items():
            least = _LEAST_BYTES_PER_S if name.startswith("bytes_") else 0 if name in _MAY_BE_NONE_AT_ALL else 1
            if value is not None and not least <= value < 2**62:
                raise InvalidRequest(
                    f"{name} {value!r} must be a whole number of at least {least}, or null", field=name
                )


class AllQuotas(msgspec.Struct):
    """Quotas by identity (`*`: of those without one of their own), and the defaults."""

    default: Quotas
    quotas: dict[str, NewQuotas]


class Whoami(msgspec.Struct):
    """The identity of a request, and what it may do. `security`: whether it is enabled in the cluster."""

    identity: str
    security: bool
    token: str | None
    expires: Time | None
    roles: tuple[str, ...]
    rules: list[AccessRule]
    quota: Quotas
    cluster_id: str | None


class NewSession(msgspec.Struct, forbid_unknown_fields=True):
    """A token to sign in with."""

    EXPECTED: ClassVar = 'the body must be JSON with a token: {"token": "nlt_…"}'

    token: Annotated[str, Meta(max_length=200)]


class SignedIn(msgspec.Struct):
    """`csrf`: requests of the session that change something must have it in the header `Natslog-Csrf`."""

    identity: str
    csrf: str


class SessionState(msgspec.Struct):
    """`needs_token`: this broker needs credentials, and the request had none. `csrf`: empty without a session."""

    needs_token: bool
    identity: str
    csrf: str
    may_monitor: bool
    may_administer: bool


class Token(msgspec.Struct, kw_only=True):
    """A bearer token. `token`: the token itself, in the response to its creation only."""

    id: str
    identity: Identity
    created: Time
    expires: Time | None
    expired: bool
    note: str
    roles: tuple[str, ...]
    token: str | UnsetType = UNSET


class NewToken(msgspec.Struct, forbid_unknown_fields=True):
    """`roles`: the identity gets them, too. `expires`: a duration such as `90d`, or `never`."""

    identity: IdentityText
    roles: list[Name] = []
    expires: float | str = "365d"
    note: str = ""

    def __post_init__(self) -> None:
        check_identity(self.identity)
        if self.identity == ANONYMOUS:
            raise InvalidRequest(f"{ANONYMOUS} is the identity of requests without credentials: it has no token")
        if len(self.note) > _MAX_NOTE_CHARS or not self.note.isprintable():
            raise InvalidRequest(f"note must be a line of at most {_MAX_NOTE_CHARS} characters", field="note")


class Verdict(msgspec.Struct):
    """Whether an identity may do something to the `subjects` of a stream, and the rule that decides, if one does."""

    identity: str
    roles: tuple[str, ...]
    action: Action
    stream: str
    subjects: tuple[str, ...]
    allowed: bool
    allowed_subjects: tuple[str, ...]
    rule: AccessRule | None


class Roles(msgspec.Struct):
    """The roles of an identity."""

    identity: Identity
    roles: tuple[str, ...]


# ---- parameters ----


class OfIdentity(msgspec.Struct, frozen=True):
    """Whose."""

    identity: Annotated[str, Meta(description="name of the identity")]


class RolePath(OfIdentity, frozen=True):
    """A role of an identity."""

    role: NameText


class TokenPath(msgspec.Struct, frozen=True):
    """The id of a token."""

    token: str


class RulePath(msgspec.Struct, frozen=True):
    """The id of a rule."""

    rule: Annotated[str, Meta(extra_json_schema={"pattern": "^r[0-9]+$"})]


class CheckOf(msgspec.Struct, kw_only=True, frozen=True):
    """What is checked: may an identity do this?"""

    identity: Annotated[str | None, Meta(description="by default the identity of this request")] = None
    action: Annotated[Action, Meta(description="see AccessRule")]
    stream: Annotated[
        str, Meta(description="name of a stream, which need not exist; by default * (the whole cluster)")
    ] = ALL_STREAMS
    subject: Annotated[str | None, Meta(description="by default all subjects that the stream has recorded")] = None

    def __post_init__(self) -> None:
        if self.identity is not None:
            check_identity(self.identity)
        if self.subject is not None:
            check_subject_pattern(self.subject)
