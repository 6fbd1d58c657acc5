"""Identities and their rights: who asks, tokens, access rules, roles, quotas."""

from __future__ import annotations

from typing import Any

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
from natslog.errors import InvalidRequest, SecurityNotFound, did_you_mean
from natslog.http import shapes
from natslog.http.access import AUDITED, GUARD, access, rights_of
from natslog.http.bodies import json_body
from natslog.http.context import broker_of, query, request_id
from natslog.http.shapes import shape_response
from natslog.security import tokens
from natslog.security.guard import Identity
from natslog.security.limits import DEFAULTS
from natslog.security.records import (
    ALL_STREAMS,
    ALL_SUBJECTS,
    ANONYMOUS,
    EVERYONE,
    QUOTA_NAMES,
    ROLE_PREFIX,
    Action,
    Quota,
    Rule,
    Security,
    TokenRecord,
    check_action,
    check_identity,
    check_role,
    check_stream_pattern,
    check_subject_pattern,
    check_who,
)
from natslog.subjects import check_name
from natslog.times import format_timestamp_us
from natslog.units import parse_duration_s

routes = web.RouteTableDef()

_MAX_NOTE_CHARS = 200
_DEFAULT_EXPIRES = "365d"
_LEAST_BYTES_PER_S = 64 * 1024


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


def _known(body: dict[str, Any], *fields: str) -> None:
    for name in body:
        if name not in fields:
            raise InvalidRequest(f"unknown field {name[:40]!r}{did_you_mean(name, fields)}", field=name[:40])


# ---- who asks ----


@routes.get("/v1/whoami")
@access("credentials")
async def whoami(request: web.Request) -> web.Response:
    """The identity behind the request, its roles, and what it may do."""
    query(request)
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


@routes.get("/v1/tokens")
@access("cluster", "admin")
async def list_tokens(request: web.Request) -> web.Response:
    """All tokens, without their secrets."""
    query(request)
    broker = broker_of(request)
    await broker.require_up_to_date()
    now_us, security = broker.cluster.clock.latest_us(), _security(request)
    shown = [_shown_token(security, one, now_us) for one in security.tokens.values()]
    return shape_response(sorted(shown, key=lambda one: (one.identity, one.created)))


@routes.post("/v1/tokens")
@access("cluster", "admin")
async def create_token(request: web.Request) -> web.Response:
    """`{"identity": "alice", "roles": ["reader"], "expires": "90d", "note": "…"}`. The response has the token, which is
    never shown again.
    """
    query(request)
    body, broker = await json_body(request), broker_of(request)
    _known(body, "identity", "roles", "expires", "note")
    identity, note = check_identity(body.get("identity")), body.get("note", "")
    if identity == ANONYMOUS:
        raise InvalidRequest(f"{ANONYMOUS} is the identity of requests without credentials: it has no token")
    if not isinstance(note, str) or len(note) > _MAX_NOTE_CHARS or not note.isprintable():
        raise InvalidRequest(f"note must be a line of at most {_MAX_NOTE_CHARS} characters", field="note")
    roles = body.get("roles", [])
    if not isinstance(roles, list):
        raise InvalidRequest("roles must be a list of names", field="roles")
    _security(request)
    secret, now_us = tokens.new_secret(), broker.cluster.clock.latest_us()
    record = TokenRecord(
        id=tokens.token_id(request_id(request).id),
        identity=identity,
        digest=tokens.digest_of(secret),
        created_us=now_us,
        expires_us=_expiry_us(body.get("expires", _DEFAULT_EXPIRES), now_us),
        note=note,
    )
    await _change(request, CreateToken(token=record, roles=tuple(map(check_role, roles))))
    stored = _security(request).tokens.get(record.id)
    if stored is None or stored.digest != record.digest:  # a repeated request: the first one created another secret
        raise tokens.lost(record.id)
    shown = _shown_token(_security(request), record, now_us)
    shown.token = tokens.text_of(record.id, secret)
    audited: dict[str, object] = {"created_token": record.id}
    request[AUDITED] = audited
    return shape_response(shown, status=201, headers={"Cache-Control": "no-store"})


def _expiry_us(expires: object, now_us: int) -> int | None:
    """Raises InvalidRequest."""
    if expires == "never":
        return None
    if not isinstance(expires, str | int | float) or isinstance(expires, bool):
        raise InvalidRequest('expires must be a duration such as "90d", or "never"', field="expires")
    return now_us + int(parse_duration_s(expires, "expires") * 1_000_000)


@routes.delete("/v1/tokens/{token}")
@access("cluster", "admin")
async def revoke_token(request: web.Request) -> web.Response:
    """Requests with this token are refused from now on, and those in progress end."""
    query(request)
    await _change(request, RevokeToken(id=tokens.checked_id(request.match_info["token"])))
    return web.Response(status=204)


# ---- rules ----


@routes.get("/v1/acl")
@access("cluster", "admin")
async def list_rules(request: web.Request) -> web.Response:
    query(request)
    await broker_of(request).require_up_to_date()
    return shape_response(list(map(_shown_rule, _security(request).rules.values())))


def _shown_rule(rule: Rule) -> shapes.AccessRule:
    return shapes.AccessRule(rule.id, rule.who, rule.action, rule.stream, rule.subject)


@routes.post("/v1/acl")
@access("cluster", "admin")
async def add_rule(request: web.Request) -> web.Response:
    """`{"who": "alice", "action": "read", "stream": "orders*", "subject": "orders.eu.>"}`; `who` may be `role:NAME` or
    `*`. 200: the rule exists already.
    """
    query(request)
    body = await json_body(request)
    _known(body, "who", "action", "stream", "subject")
    command = AddRule(
        who=check_who(body.get("who")),
        action=check_action(body.get("action")),
        stream=check_stream_pattern(body.get("stream", ALL_STREAMS)),
        subject=check_subject_pattern(body.get("subject", ALL_SUBJECTS)),
    )
    if command.action == "monitor" and (command.stream, command.subject) != (ALL_STREAMS, ALL_SUBJECTS):
        raise InvalidRequest("monitor is for the whole cluster: leave out stream and subject", field="stream")
    added = await _change(request, command)
    wanted = command.who, command.action, command.stream, command.subject
    for rule in _security(request).rules.values():
        if (rule.who, rule.action, rule.stream, rule.subject) == wanted:
            return shape_response(_shown_rule(rule), status=201 if added else 200)
    raise SecurityNotFound("the rule was removed again by another request")


@routes.delete("/v1/acl/{rule:r[0-9]+}")
@access("cluster", "admin")
async def drop_rule(request: web.Request) -> web.Response:
    query(request)
    await _change(request, DropRule(id=request.match_info["rule"]))
    return web.Response(status=204)


@routes.get("/v1/acl/check")
@access("credentials")
async def check_rule(request: web.Request) -> web.Response:
    """Whether an identity may do something, and the rule that decides. Without `identity`: the one that asks; for
    another one, `admin` is needed. Without `subject`: everything that the stream has recorded.
    """
    values = query(request, "identity", "action", "stream", "subject")
    broker, rights = broker_of(request), rights_of(request)
    identity = check_identity(values.get("identity", rights.identity.name))
    if identity != rights.identity.name:
        rights.require("admin")
    action, stream = check_action(values.get("action")), values.get("stream", ALL_STREAMS)
    _security(request)
    if stream == ALL_STREAMS:
        return shape_response(_on_everything(request, identity, action))
    check_name(stream)
    record = broker.state.streams.get(stream)
    if record is not None and not rights.may_see(stream, record.recorded_subjects):
        record = None  # which subjects it records is for those who may see it
    if "subject" in values:
        subjects: tuple[str, ...] = (check_subject_pattern(values["subject"]),)
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


@routes.get("/v1/roles")
@access("cluster", "admin")
async def list_roles(request: web.Request) -> web.Response:
    """By identity."""
    query(request)
    await broker_of(request).require_up_to_date()
    return shape_response(dict(sorted(_security(request).roles.items())))


@routes.put("/v1/roles/{role}")
@access("cluster", "admin")
async def assign_role(request: web.Request) -> web.Response:
    """`?identity=alice`"""
    return await _assign(request, is_assigned=True)


@routes.delete("/v1/roles/{role}")
@access("cluster", "admin")
async def unassign_role(request: web.Request) -> web.Response:
    """`?identity=alice`"""
    return await _assign(request, is_assigned=False)


async def _assign(request: web.Request, *, is_assigned: bool) -> web.Response:
    identity = check_identity(query(request, "identity").get("identity"))
    role = check_role(request.match_info["role"])
    await _change(request, AssignRole(identity=identity, role=role, is_assigned=is_assigned))
    return shape_response(shapes.Roles(identity, _security(request).roles.get(identity, ())))


# ---- quotas ----


def _with_defaults(quota: Quota) -> shapes.Quotas:
    """With the defaults of a broker."""
    given = {name: getattr(quota, name) for name in QUOTA_NAMES}
    return shapes.Quotas(**{name: getattr(DEFAULTS, name) if own is None else own for name, own in given.items()})


def _own(quota: Quota) -> shapes.NewQuotas:
    return shapes.NewQuotas(**msgspec.structs.asdict(quota))


@routes.get("/v1/quotas")
@access("cluster", "admin")
async def list_quotas(request: web.Request) -> web.Response:
    """By identity; `*`: of identities without one of their own; `default`: where neither has a value."""
    query(request)
    await broker_of(request).require_up_to_date()
    quotas = _security(request).quotas
    return shape_response(
        shapes.AllQuotas(_with_defaults(Quota()), {name: _own(quota) for name, quota in sorted(quotas.items())})
    )


@routes.put("/v1/quotas")
@access("cluster", "admin")
async def set_quota(request: web.Request) -> web.Response:
    """`?identity=alice` and the limits as the body; what is not given has its default."""
    identity, body = _quota_identity(request), await json_body(request)
    _known(body, *QUOTA_NAMES)
    for name, value in body.items():
        least = _LEAST_BYTES_PER_S if name.startswith("bytes_") else 0 if name in _MAY_BE_NONE_AT_ALL else 1
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**62):
            raise InvalidRequest(f"{name} {value!r} must be a whole number of at least {least}, or null", field=name)
    quota = Quota(**body)
    await _change(request, SetQuota(identity=identity, quota=quota))
    return shape_response(_own(quota))


_MAY_BE_NONE_AT_ALL = frozenset({"streams", "stored_bytes", "cursors", "polls"})


@routes.delete("/v1/quotas")
@access("cluster", "admin")
async def drop_quota(request: web.Request) -> web.Response:
    await _change(request, SetQuota(identity=_quota_identity(request), quota=None))
    return web.Response(status=204)


def _quota_identity(request: web.Request) -> str:
    identity = query(request, "identity").get("identity")
    return EVERYONE if identity == EVERYONE else check_identity(identity)
