"""Commands about security: their form is stored and sent, tags included."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from natslog.security.records import Action, Quota, TokenRecord


class EnableSecurity(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """From now on every request needs a permission. `token`: of the first administrator."""

    token: TokenRecord


class CreateToken(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """`roles`: the identity gets them, too."""

    token: TokenRecord
    roles: tuple[str, ...] = ()


class RevokeToken(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    id: str


class AddRule(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    who: str
    action: Action
    stream: str
    subject: str


class DropRule(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    id: str


class AssignRole(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """`is_assigned`: whether the identity has the role from now on."""

    identity: str
    role: str
    is_assigned: bool


class SetQuota(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """`quota`: None removes it."""

    identity: str
    quota: Quota | None


SecurityCommand: TypeAlias = EnableSecurity | CreateToken | RevokeToken | AddRule | DropRule | AssignRole | SetQuota
