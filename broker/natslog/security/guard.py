"""The one place that decides: who makes a request, and may this identity do this to that?

Every interface of a broker asks it. `Guard.identify` turns credentials into an `Identity`; `Guard.rights` gives what
the rules permit to it *now*. A request that takes long is compared again (`Guard.is_valid`, and its rights), so that a
token that was revoked or has expired, or a rule that was removed, ends it.

Without security (`security` is None and it is not required), every request is permitted, and nothing is looked up.

Invariants. What is not permitted by a rule is refused. Nothing here is stored; the state is that of the metadata at the
time of the call. Credentials never appear in errors.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from natslog.errors import Forbidden, InvalidRequest, NotReady, Starting, Unauthorized
from natslog.security import tokens
from natslog.security.decisions import Decisions, Patterns, is_whole, touches
from natslog.security.records import ACTIONS, ANONYMOUS, Action, Quota, Rule, Security, check_identity, quota_of
from natslog.subjects import includes

CertificateNames = Literal["cn", "san"]
"""Where the identity of a client certificate is: the common name of its subject, or its first URI, e-mail address or
DNS name (subject alternative name)."""
_VERBS: dict[Action, str] = {
    "read": "read",
    "publish": "publish to",
    "manage": "manage",
    "cursor": "set cursors on",
    "monitor": "monitor",
    "admin": "administer",
}
_SAN_KINDS = ("URI", "email", "DNS")
_MAX_AUTHORIZATION_CHARS = 512


@dataclass(frozen=True, slots=True)
class Identity:
    """Who makes a request. `token`: the id of its token; "" for a certificate, and without credentials.

    Attributes:
        expires_us: when these credentials expire; None: never.
    """

    name: str
    token: str = ""
    expires_us: int | None = None

    @property
    def is_anonymous(self) -> bool:
        return self.name == ANONYMOUS


NO_CREDENTIALS = Identity(ANONYMOUS)


class Guard:
    """Of one broker.

    Args:
        security: the state of the metadata now. `now_us`: time of the cluster's clocks, in microseconds since 1970.
        is_required: whether nothing is permitted while `security` is None.
        is_current: whether the state includes all that was committed when this broker started. Until then no client is
            identified: a token may have been created or revoked by a change that is still to be applied.
    """

    def __init__(
        self,
        security: Callable[[], Security | None],
        now_us: Callable[[], int],
        *,
        is_required: bool = False,
        is_current: Callable[[], bool] = lambda: True,
        certificate_names: CertificateNames = "cn",
    ) -> None:
        self._security, self._now_us = security, now_us
        self._is_current = is_current
        self._is_required = is_required
        self._certificate_names = certificate_names
        self._decisions = Decisions(Security())

    @property
    def is_on(self) -> bool:
        return self._is_required or self._security() is not None

    @property
    def decisions(self) -> Decisions:
        """Raises Starting: the state is not current. NotReady: security is required, and not enabled yet."""
        self._require_current()
        security = self._security()
        if security is None:
            raise NotReady(
                "security is being enabled in this cluster: repeat the request in a moment. If this persists, see the "
                "log of the broker for the reason"
            )
        if self._decisions.security is not security:
            self._decisions = Decisions(security)
        return self._decisions

    def _require_current(self) -> None:
        if not self._is_current():
            raise Starting("the broker is starting: repeat the request in a moment, or send it to another broker")

    # ---- who ----

    def identify(self, authorization: str | None, certificate: Mapping[str, Any] | None) -> Identity:
        """The identity of a token; without one, of a client certificate; else `NO_CREDENTIALS`.

        Args:
            authorization: the header of this name. `certificate`: verified, as `ssl.SSLSocket.getpeercert` returns it.

        Raises:
            Unauthorized: the credentials are not valid. Starting: that is not known yet.
        """
        if not self.is_on:
            return NO_CREDENTIALS
        self._require_current()
        if authorization is not None:
            return self._of_token(authorization)
        if certificate:
            return self._of_certificate(certificate)
        return NO_CREDENTIALS

    def _of_token(self, authorization: str) -> Identity:
        scheme, _, text = authorization[:_MAX_AUTHORIZATION_CHARS].partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("the header Authorization must be 'Bearer' and a token of natslog")
        parsed = tokens.parsed(text.strip())
        if parsed is None:
            raise Unauthorized("the token is not one of natslog: it begins with nlt_ and has 60 characters")
        token_id, digest = parsed
        record = self.decisions.security.tokens.get(token_id)
        if record is None or not tokens.is_of(record, digest):
            raise Unauthorized(
                "the token is unknown or was revoked: ask an administrator for another one (natslog token create). If "
                "no administrator has a valid token, start a broker once with --new-admin-token",
                token=token_id,
            )
        if record.expires_us is not None and record.expires_us <= self._now_us():
            raise Unauthorized(
                f"the token {token_id} has expired: ask an administrator for another one (natslog token create)",
                token=token_id,
            )
        return Identity(record.identity, token_id, record.expires_us)

    def _of_certificate(self, certificate: Mapping[str, Any]) -> Identity:
        name = _name_in(certificate, self._certificate_names)
        if name is None:
            where = "common name" if self._certificate_names == "cn" else "subject alternative name"
            raise Unauthorized(f"the client certificate has no {where}, which would be the identity (tls_identity)")
        try:
            check_identity(name)
        except InvalidRequest as error:
            raise Unauthorized(f"the name in the client certificate cannot be used: {error.message}") from error
        if name == ANONYMOUS:
            raise Unauthorized(f"the name in the client certificate must not be {ANONYMOUS!r}")
        expires_us = _expiry_us(certificate)
        if expires_us is not None and expires_us <= self._now_us():
            raise Unauthorized("the client certificate has expired: renew it")
        return Identity(name, expires_us=expires_us)

    def is_valid(self, identity: Identity) -> bool:
        """Whether credentials that were valid when the request came are valid still."""
        if not self.is_on:
            return True
        if identity.expires_us is not None and identity.expires_us <= self._now_us():
            return False
        if not identity.token:
            return True
        record = self.decisions.security.tokens.get(identity.token)
        return record is not None and record.identity == identity.name

    # ---- what ----

    def rights(self, identity: Identity) -> Rights:
        return Rights(self, identity)

    def quota(self, identity: Identity) -> Quota:
        security = self._security()
        return Quota() if security is None else quota_of(security, identity.name)


class Rights:
    """What one identity may do. Each method asks the rules of the time at which it is called."""

    __slots__ = ("_guard", "identity")

    def __init__(self, guard: Guard, identity: Identity) -> None:
        self._guard, self.identity = guard, identity

    @property
    def owner(self) -> str:
        """The identity that owns what this request creates; "" without security."""
        return self.identity.name if self._guard.is_on else ""

    @property
    def is_limited(self) -> bool:
        """Whether quotas apply."""
        return self._guard.is_on

    def quota(self) -> Quota:
        return self._guard.quota(self.identity)

    def roles(self) -> Patterns:
        return self._guard.decisions.roles(self.identity.name) if self._guard.is_on else ()

    def may(self, action: Action) -> bool:
        """On everything in the cluster."""
        return not self._guard.is_on or bool(self._guard.decisions.rules(self.identity.name, action))

    def require(self, action: Action) -> None:
        """On everything in the cluster. Raises Forbidden, Unauthorized."""
        if not self.may(action):
            what = f"{self.identity.name} may not {_VERBS[action]} the cluster"
            raise self._refused(what, action, "'*'")

    def require_credentials(self) -> None:
        """Raises Unauthorized: there are none, and no rule permits anything without them."""
        if self._guard.is_on and self.identity.is_anonymous and not self._may_anything():
            raise _no_credentials()

    def _may_anything(self) -> bool:
        return any(self._guard.decisions.rules_of(self.identity.name, action) for action in ACTIONS)

    def subjects(self, action: Action, stream: str, recorded: Sequence[str]) -> Patterns | None:
        """The subjects of the stream on which it may do this; None: on all of them, () on none.

        Args:
            recorded: wildcards of all subjects that the stream has recorded.
        """
        if not self._guard.is_on:
            return None
        patterns = self._guard.decisions.subjects(self.identity.name, action, stream)
        if is_whole(patterns, recorded):
            return None
        return patterns if touches(patterns, recorded) else ()

    def limits(self, action: Action, stream: str, recorded: Sequence[str]) -> Patterns | None:
        """The same. Raises Forbidden, Unauthorized: it may not do this to any message of the stream."""
        patterns = self.subjects(action, stream, recorded)
        if patterns == ():
            raise self.refused_on(action, stream)
        return patterns

    def require_whole(self, action: Action, stream: str, recorded: Sequence[str]) -> None:
        """It may do this to all messages of the stream. Raises Forbidden, Unauthorized."""
        if (patterns := self.limits(action, stream, recorded)) is not None:
            raise self._refused(
                f"{self.identity.name} may {_VERBS[action]} stream {stream!r} only on the subjects "
                f"{', '.join(patterns)}; the stream has recorded {', '.join(recorded)}",
                action,
                stream,
            )

    def require_subject(self, action: Action, stream: str, subject: str) -> None:
        """It may do this on a subject that the request names itself. Raises Forbidden, Unauthorized."""
        if not self._guard.is_on:
            return
        patterns = self._guard.decisions.subjects(self.identity.name, action, stream)
        if not patterns:
            raise self.refused_on(action, stream)
        if not is_whole(patterns, (subject,)):
            raise self._refused(
                f"{self.identity.name} may {_VERBS[action]} stream {stream!r} only on the subjects "
                f"{', '.join(patterns)}, not on {subject}",
                action,
                f"{stream} --subject '{subject}'",
            )

    def require_name(self, action: Action, stream: str) -> None:
        """It may do this to a stream of this name, with some subject. Raises Forbidden, Unauthorized."""
        if self._guard.is_on and not self._guard.decisions.subjects(self.identity.name, action, stream):
            raise self.refused_on(action, stream)

    def may_see(self, stream: str, recorded: Sequence[str]) -> bool:
        """Whether it may do anything to the stream."""
        return any(self.subjects(action, stream, recorded) != () for action in ACTIONS)

    def refused_on(self, action: Action | None, stream: str) -> Forbidden | Unauthorized:
        what = "do anything to" if action is None else _VERBS[action]
        return self._refused(f"{self.identity.name} may not {what} stream {stream!r}", action or "ACTION", stream)

    def _refused(self, what: str, action: str, stream: str) -> Forbidden | Unauthorized:
        if self.identity.is_anonymous:
            return _no_credentials()
        return Forbidden(
            f"{what}: no access rule permits it. An administrator can add one (natslog acl add {self.identity.name} "
            f"{action} {stream})",
            identity=self.identity.name,
            action=action,
        )

    def deciding_rule(self, action: Action, stream: str, recorded: Sequence[str]) -> Rule | None:
        """The first rule that permits this on all of these subjects; None where no single rule does."""
        for rule in self._guard.decisions.rules(self.identity.name, action, stream):
            if all(includes(rule.subject, subject) for subject in recorded):
                return rule
        return None


def _no_credentials() -> Unauthorized:
    return Unauthorized(
        "this broker requires credentials: send a token (--token-file, NATSLOG_TOKEN_FILE; option tokenFile in Spark) "
        "or a client certificate"
    )


def _expiry_us(certificate: Mapping[str, Any]) -> int | None:
    text = certificate.get("notAfter")
    return None if text is None else int(ssl.cert_time_to_seconds(text)) * 1_000_000


def _name_in(certificate: Mapping[str, Any], where: CertificateNames) -> str | None:
    """Of the subject or the alternative names, as `getpeercert` returns them."""
    if where == "san":
        names = list(certificate.get("subjectAltName", ()))
        return next((str(name) for kind in _SAN_KINDS for its, name in names if its == kind), None)
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    return next((str(value) for key, value in subject if key == "commonName"), None)
