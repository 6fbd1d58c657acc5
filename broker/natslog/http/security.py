"""Identities and their rights: who asks, tokens, access rules, roles, quotas."""

from __future__ import annotations

import msgspec
from aiohttp import web

from natslog.cluster.security_commands import (
    AddRule,
    AssignRole,
    CreateToken,
    DropRule,
    RevokeToken,
    SecurityCommand,
    SetQuota,
)
from natslog.errors import InvalidRequest, SecurityNotFound
from natslog.http.access import AUDITED, GUARD, rights_of
from natslog.http.context import broker_of, request_id
from natslog.http.endpoint import Call, PlainCall
from natslog.http.shapes import security as shapes
from natslog.http.shapes.common import Answer, shape_response
from natslog.security import tokens
from natslog.security.guard import Identity
from natslog.security.limits import DEFAULTS
from natslog.security.records import (
    ALL_STREAMS,
    ALL_SUBJECTS,
    EVERYONE,
    QUOTA_NAMES,
    ROLE_PREFIX,
    Action,
    Quota,
    Rule,
    Security,
    TokenRecord,
    check_identity,
    check_role,
)
from natslog.subjects import check_name
from natslog.times import format_timestamp_us
from natslog.units import parse_duration_s


def _security(request: web.Request) -> Security:
    """Raises InvalidRequest: it is not enabled."""
    found: Security | None = broker_of(request).state.security
    if found is None:
        raise InvalidRequest(
            "security is not enabled in this cluster: set security = true in the configuration of its brokers"
        )
    return found


async def _change(request: web.Request, command: SecurityCommand) -> bool:
    return await broker_of(request).change(command, request_id(request))


# ---- who asks ----


async def whoami(call: PlainCall) -> Answer[shapes.Whoami]:
    """The identity of this request, and what it may do"""
    request = call.request
    broker, guard, rights = broker_of(request), request.app[GUARD], rights_of(request)
    identity = rights.identity
    rules: list[Rule] = []
    if guard.is_on:
        who = {identity.name, *(f"{ROLE_PREFIX}{role}" for role in rights.roles())}
        who |= set() if identity.is_anonymous else {EVERYONE}
        rules = [rule for rule in guard.decisions.security.rules.values() if rule.who in who]
    shown = shapes.Whoami(
        identity=identity.name,
        security=guard.is_on,
        token=identity.token or None,
        expires=_time(identity.expires_us),
        roles=rights.roles(),
        rules=list(map(_shown_rule, rules)),
        quota=_with_defaults(rights.quota()),
        cluster_id=broker.cluster.cluster_id,
    )
    return shape_response(shown)


def _time(time_us: int | None) -> str | None:
    return None if time_us is None else format_timestamp_us(time_us)


# ---- tokens ----


def _shown_token(security: Security, record: TokenRecord, now_us: int) -> shapes.Token:
    return shapes.Token(
        id=record.id,
        identity=record.identity,
        created=format_timestamp_us(record.created_us),
        expires=_time(record.expires_us),
        expired=record.expires_us is not None and record.expires_us <= now_us,
        note=record.note,
        roles=security.roles.get(record.identity, ()),
    )


async def list_tokens(call: PlainCall) -> Answer[list[shapes.Token]]:
    """All tokens, without their secrets"""
    broker = broker_of(call.request)
    await broker.require_up_to_date()
    now_us, security = broker.cluster.clock.latest_us(), _security(call.request)
    shown = [_shown_token(security, one, now_us) for one in security.tokens.values()]
    return shape_response(sorted(shown, key=lambda one: (one.identity, one.created)))


async def create_token(call: Call[None, shapes.NewToken]) -> Answer[shapes.Token]:
    """Create a token. The response has its secret, which cannot be shown again"""
    request, asked, broker = call.request, call.body, broker_of(call.request)
    _security(request)
    secret, now_us = tokens.new_secret(), broker.cluster.clock.latest_us()
    record = TokenRecord(
        id=tokens.token_id(request_id(request).id),
        identity=asked.identity,
        digest=tokens.digest_of(secret),
        created_us=now_us,
        expires_us=_expiry_us(asked.expires, now_us),
        note=asked.note,
    )
    await _change(request, CreateToken(token=record, roles=tuple(map(check_role, asked.roles))))
    stored = _security(request).tokens.get(record.id)
    if stored is None or stored.digest != record.digest:  # a repeated request: the first one created another secret
        raise tokens.lost(record.id)
    shown = _shown_token(_security(request), record, now_us)
    shown.token = tokens.text_of(record.id, secret)
    audited: dict[str, object] = {"created_token": record.id}
    request[AUDITED] = audited
    return shape_response(shown, status=201, headers={"Cache-Control": "no-store"})


def _expiry_us(expires: float | str, now_us: int) -> int | None:
    """Raises InvalidRequest."""
    return None if expires == "never" else now_us + int(parse_duration_s(expires, "expires") * 1_000_000)


async def revoke_token(call: Call[shapes.TokenPath, None]) -> web.Response:
    """Revoke a token. Requests in progress with it end within 5 s"""
    await _change(call.request, RevokeToken(id=tokens.checked_id(call.parameters.token)))
    return web.Response(status=204)


# ---- rules ----


async def list_rules(call: PlainCall) -> Answer[list[shapes.AccessRule]]:
    """All access rules, oldest first"""
    await broker_of(call.request).require_up_to_date()
    return shape_response(list(map(_shown_rule, _security(call.request).rules.values())))


def _shown_rule(rule: Rule) -> shapes.AccessRule:
    return shapes.AccessRule(rule.id, rule.who, rule.action, rule.stream, rule.subject)


async def add_rule(call: Call[None, shapes.NewRule]) -> Answer[shapes.AccessRule]:
    """Permit an action (200: the rule exists)"""
    asked = call.body
    command = AddRule(who=asked.who, action=asked.action, stream=asked.stream, subject=asked.subject)
    added = await _change(call.request, command)
    wanted = command.who, command.action, command.stream, command.subject
    for rule in _security(call.request).rules.values():
        if (rule.who, rule.action, rule.stream, rule.subject) == wanted:
            return shape_response(_shown_rule(rule), status=201 if added else 200)
    raise SecurityNotFound("the rule was removed again by another request")


async def drop_rule(call: Call[shapes.RulePath, None]) -> web.Response:
    """Remove an access rule"""
    await _change(call.request, DropRule(id=call.parameters.rule))
    return web.Response(status=204)


async def check_rule(call: Call[shapes.CheckOf, None]) -> Answer[shapes.Verdict]:
    """Whether an identity may do something, and the rule that decides. For other identities it needs admin

    Without `subject`: everything that the stream has recorded.
    """
    request, question = call.request, call.parameters
    broker, rights = broker_of(request), rights_of(request)
    identity = rights.identity.name if question.identity is None else question.identity
    if identity != rights.identity.name:
        rights.require("admin")
    action, stream = question.action, question.stream
    _security(request)
    if stream == ALL_STREAMS:
        return shape_response(_on_everything(request, identity, action))
    check_name(stream)
    record = broker.state.streams.get(stream)
    if record is not None and not rights.may_see(stream, record.recorded_subjects):
        record = None  # which subjects it records is for those who may see it
    if question.subject is not None:
        subjects: tuple[str, ...] = (question.subject,)
    else:
        subjects = (ALL_SUBJECTS,) if record is None else record.recorded_subjects
    asked = request.app[GUARD].rights(Identity(identity))
    rule, limits = asked.deciding_rule(action, stream, subjects), asked.subjects(action, stream, subjects)
    shown = shapes.Verdict(
        identity=identity,
        roles=asked.roles(),
        action=action,
        stream=stream,
        subjects=subjects,
        allowed=limits is None,
        allowed_subjects=subjects if limits is None else limits,
        rule=None if rule is None else _shown_rule(rule),
    )
    return shape_response(shown)


def _on_everything(request: web.Request, identity: str, action: Action) -> shapes.Verdict:
    """Whether the identity may do this on all streams and subjects, and so in the cluster."""
    asked = request.app[GUARD].rights(Identity(identity))
    rules = request.app[GUARD].decisions.rules(identity, action)
    return shapes.Verdict(
        identity=identity,
        roles=asked.roles(),
        action=action,
        stream=ALL_STREAMS,
        subjects=(ALL_SUBJECTS,),
        allowed=bool(rules),
        allowed_subjects=(ALL_SUBJECTS,) if rules else (),
        rule=_shown_rule(rules[0]) if rules else None,
    )


# ---- roles ----


async def list_roles(call: PlainCall) -> Answer[dict[str, tuple[str, ...]]]:
    """The roles of each identity that has any"""
    await broker_of(call.request).require_up_to_date()
    return shape_response(dict(sorted(_security(call.request).roles.items())))


async def assign_role(call: Call[shapes.RolePath, None]) -> Answer[shapes.Roles]:
    """Give a role to an identity"""
    return await _assign(call, is_assigned=True)


async def unassign_role(call: Call[shapes.RolePath, None]) -> Answer[shapes.Roles]:
    """Take a role from an identity"""
    return await _assign(call, is_assigned=False)


async def _assign(call: Call[shapes.RolePath, None], *, is_assigned: bool) -> Answer[shapes.Roles]:
    identity, role = check_identity(call.parameters.identity), check_role(call.parameters.role)
    await _change(call.request, AssignRole(identity=identity, role=role, is_assigned=is_assigned))
    return shape_response(shapes.Roles(identity, _security(call.request).roles.get(identity, ())))


# ---- quotas ----


def _with_defaults(quota: Quota) -> shapes.Quotas:
    """With the defaults of a broker."""
    given = {name: getattr(quota, name) for name in QUOTA_NAMES}
    return shapes.Quotas(**{name: getattr(DEFAULTS, name) if own is None else own for name, own in given.items()})


def _own(quota: Quota) -> shapes.NewQuotas:
    return shapes.NewQuotas(**msgspec.structs.asdict(quota))


async def list_quotas(call: PlainCall) -> Answer[shapes.AllQuotas]:
    """All quotas, and the defaults"""
    await broker_of(call.request).require_up_to_date()
    quotas = _security(call.request).quotas
    return shape_response(
        shapes.AllQuotas(_with_defaults(Quota()), {name: _own(quota) for name, quota in sorted(quotas.items())})
    )


async def set_quota(call: Call[shapes.OfIdentity, shapes.NewQuotas]) -> Answer[shapes.NewQuotas]:
    """Set the quota of an identity, or of * (identities without one of their own)"""
    call.body.check()
    quota = Quota(**msgspec.structs.asdict(call.body))
    await _change(call.request, SetQuota(identity=_quota_identity(call.parameters.identity), quota=quota))
    return shape_response(call.body)


async def drop_quota(call: Call[shapes.OfIdentity, None]) -> web.Response:
    """Remove the quota of an identity"""
    await _change(call.request, SetQuota(identity=_quota_identity(call.parameters.identity), quota=None))
    return web.Response(status=204)


def _quota_identity(identity: str) -> str:
    return EVERYONE if identity == EVERYONE else check_identity(identity)
