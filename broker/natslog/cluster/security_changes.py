"""How the tokens, rules, roles and quotas of a cluster change. Pure: each function returns the next state.

Invariant. Once there are rules, one of them permits `admin` on everything: a cluster without an administrator could
not be changed any more.
"""

from __future__ import annotations

from typing import Any, TypeVar, assert_never

from msgspec.structs import replace

from natslog.cluster.security_commands import (
    AddRule,
    AssignRole,
    CreateToken,
    DropRule,
    EnableSecurity,
    RevokeToken,
    SecurityCommand,
    SetQuota,
)
from natslog.errors import InvalidRequest, SecurityConflict, SecurityNotFound
from natslog.security.records import (
    ADMIN_ROLE,
    ALL_STREAMS,
    ALL_SUBJECTS,
    MAX_QUOTAS,
    MAX_ROLES,
    MAX_RULES,
    MAX_TOKENS,
    ROLE_PREFIX,
    Rule,
    Security,
    TokenRecord,
)
from natslog.security.tokens import lost

Value = TypeVar("Value")

_KEEP_EXPIRED_US = 30 * 24 * 3600 * 1_000_000
"""For which an expired token is listed, so that an operator finds out why a program is refused."""


def changed_security(security: Security | None, command: SecurityCommand) -> Security:
    """The state after the command; the same object where it changes nothing.

    Raises:
        SecurityConflict, SecurityNotFound, InvalidRequest: the command is refused.
    """
    if isinstance(command, EnableSecurity):
        return _enabled(command.token) if security is None else security
    if security is None:
        raise InvalidRequest(
            "security is not enabled in this cluster: set security = true in the configuration of its brokers"
        )
    match command:
        case CreateToken(token=token, roles=roles):
            for role in roles:
                security = _assigned(security, token.identity, role)
            return replace(security, tokens=_with_token(security, token))
        case RevokeToken(id=token_id):
            return replace(security, tokens=_without(security.tokens, token_id, "token"))
        case AddRule():
            return _with_rule(security, command)
        case DropRule(id=rule_id):
            return _checked(replace(security, rules=_without(security.rules, rule_id, "rule")))
        case AssignRole(identity=identity, role=role, is_assigned=is_assigned):
            return _assigned(security, identity, role) if is_assigned else _unassigned(security, identity, role)
        case SetQuota(identity=identity, quota=quota):
            if quota is None:
                return replace(security, quotas=_without(security.quotas, identity, "quota"))
            _require_room(security.quotas, identity, MAX_QUOTAS, "quotas")
            return replace(security, quotas=security.quotas | {identity: quota})
        case _:
            assert_never(command)


def _enabled(token: TokenRecord) -> Security:
    rule = Rule(id="r1", who=f"{ROLE_PREFIX}{ADMIN_ROLE}", action="admin")
    return Security(
        tokens={token.id: token}, rules={rule.id: rule}, roles={token.identity: (ADMIN_ROLE,)}, rules_made=1
    )


def _with_token(security: Security, token: TokenRecord) -> dict[str, TokenRecord]:
    """Raises SecurityConflict: a token of this id exists."""
    oldest_us = token.created_us - _KEEP_EXPIRED_US
    tokens = {one.id: one for one in security.tokens.values() if one.expires_us is None or one.expires_us >= oldest_us}
    if token.id in tokens:
        raise lost(token.id)
    _require_room(tokens, token.id, MAX_TOKENS, "tokens")
    return tokens | {token.id: token}


def _with_rule(security: Security, command: AddRule) -> Security:
    for rule in security.rules.values():
        if (rule.who, rule.action, rule.stream, rule.subject) == (
            command.who,
            command.action,
            command.stream,
            command.subject,
        ):
            return security
    made = security.rules_made + 1
    rule = Rule(id=f"r{made}", who=command.who, action=command.action, stream=command.stream, subject=command.subject)
    _require_room(security.rules, rule.id, MAX_RULES, "rules")
    return replace(security, rules=security.rules | {rule.id: rule}, rules_made=made)


def _assigned(security: Security, identity: str, role: str) -> Security:
    roles = security.roles.get(identity, ())
    if role in roles:
        return security
    _require_room(security.roles, identity, MAX_ROLES, "identities with roles")
    return replace(security, roles=security.roles | {identity: tuple(sorted((*roles, role)))})


def _unassigned(security: Security, identity: str, role: str) -> Security:
    roles = security.roles.get(identity, ())
    if role not in roles:
        raise SecurityNotFound(f"identity {identity!r} does not have the role {role!r}", identity=identity, role=role)
    left = tuple(one for one in roles if one != role)
    kept = {name: its for name, its in security.roles.items() if name != identity}
    return _checked(replace(security, roles=kept | ({identity: left} if left else {})))


def _checked(security: Security) -> Security:
    """Raises SecurityConflict: no rule permits `admin` on everything, or no identity has its role."""
    assigned = {f"{ROLE_PREFIX}{role}" for roles in security.roles.values() for role in roles}
    for rule in security.rules.values():
        is_of_someone = not rule.who.startswith(ROLE_PREFIX) or rule.who in assigned
        if rule.action == "admin" and rule.is_for_everything and is_of_someone:
            return security
    raise SecurityConflict(
        f"this would leave no identity that may administer the cluster: first permit another one the action admin "
        f"on stream {ALL_STREAMS} and subject {ALL_SUBJECTS}"
    )


def _without(known: dict[str, Value], key: str, what: str) -> dict[str, Value]:
    if key not in known:
        raise SecurityNotFound(f"there is no {what} {key!r}", **{what: key})
    return {name: value for name, value in known.items() if name != key}


def _require_room(known: dict[str, Any], key: str, most: int, what: str) -> None:
    if key not in known and len(known) >= most:
        raise SecurityConflict(f"the cluster has {most} {what}, which is the limit: delete those that are not used")
