"""Credentials become identities; what is not valid is refused without showing it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from natslog.errors import Forbidden, InvalidRequest, NotReady, Starting, Unauthorized
from natslog.security import tokens
from natslog.security.guard import NO_CREDENTIALS, Guard, Identity
from natslog.security.records import (
    Rule,
    Security,
    TokenRecord,
    check_identity,
    check_stream_pattern,
    check_who,
)

NOW_US = 1_800_000_000_000_000
SECRET = "A1-_" * 10 + "xyz"
TOKEN = TokenRecord(id="0123456789ab", identity="alice", digest=tokens.digest_of(SECRET), created_us=NOW_US)
SECURITY = Security(
    tokens={TOKEN.id: TOKEN},
    rules={"r1": Rule(id="r1", who="alice", action="read", stream="orders", subject="orders.eu.>")},
)
HEADER = f"Bearer {tokens.text_of(TOKEN.id, SECRET)}"


def guard(security: Security | None = SECURITY, **settings: Any) -> Guard:
    return Guard(lambda: security, lambda: NOW_US, **settings)


def certificate(common_name: str | None = "alice", **more: Any) -> dict[str, Any]:
    """As `ssl.SSLSocket.getpeercert` returns it."""
    subject = () if common_name is None else ((("commonName", common_name),),)
    return {"subject": ((("organizationName", "x"),), *subject), "notAfter": "Jan  1 00:00:00 2030 GMT", **more}


def test_a_token_is_the_identity_that_it_was_created_for() -> None:
    assert guard().identify(HEADER, None) == Identity("alice", TOKEN.id)
    assert guard().identify(HEADER.replace("Bearer", "bearer"), None).name == "alice"


def test_until_the_state_is_current_no_credentials_are_judged() -> None:
    """A token may have been created, or revoked, by a change that is still to be applied."""
    current = [False]
    starting = guard(is_current=lambda: current[0])
    for header, given in ((HEADER, None), ("Bearer nlt_wrong", None), (None, certificate()), (None, None)):
        with pytest.raises(Starting) as refused:
            starting.identify(header, given)
        assert (refused.value.status, refused.value.code, refused.value.retriable) == (503, "starting", True)
    with pytest.raises(Starting):
        starting.rights(Identity("alice", TOKEN.id)).require("manage")
    current[0] = True
    assert starting.identify(HEADER, None) == Identity("alice", TOKEN.id)
    assert not guard(None, is_current=lambda: False).is_on, "there is nothing to judge by, and nothing to protect"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic YWxpY2U6c2VjcmV0",
        f"Bearer {tokens.text_of(TOKEN.id, 'B' * 43)}",
        f"Bearer {tokens.text_of('0' * 12, SECRET)}",
        f"Bearer {tokens.text_of(TOKEN.id, SECRET)}x",
        f"Bearer {SECRET}",
        f"Bearer {TOKEN.digest}",
        f"Bearer nlt_{TOKEN.id}_{TOKEN.digest[:43]}",
        f"Bearer {tokens.text_of(TOKEN.id, SECRET)}\n",
        "Bearer " + "x" * 100_000,
        f"Bearer {tokens.text_of(TOKEN.id, SECRET).replace('_', '＿')}",
    ],
)
def test_wrong_credentials_are_refused_and_not_shown(header: str) -> None:
    if header.endswith("\n"):
        assert guard().identify(header, None).name == "alice"  # white space at the end is not a part of the token
        return
    with pytest.raises(Unauthorized) as refused:
        guard().identify(header, certificate())
    assert SECRET not in refused.value.message
    assert len(refused.value.message) < 200


def test_an_expired_token_is_refused_and_ends_requests_in_progress() -> None:
    expiring = replace(SECURITY, tokens={TOKEN.id: replace(TOKEN, expires_us=NOW_US)})
    with pytest.raises(Unauthorized, match="expired"):
        guard(expiring).identify(HEADER, None)
    still = replace(SECURITY, tokens={TOKEN.id: replace(TOKEN, expires_us=NOW_US + 1)})
    identity = guard(still).identify(HEADER, None)
    assert guard(still).is_valid(identity)
    assert not Guard(lambda: still, lambda: NOW_US + 1).is_valid(identity)


def test_a_revoked_token_ends_requests_in_progress() -> None:
    identity = guard().identify(HEADER, None)
    assert not guard(replace(SECURITY, tokens={})).is_valid(identity)
    assert not guard(replace(SECURITY, tokens={TOKEN.id: replace(TOKEN, identity="bob")})).is_valid(identity)


def test_a_certificate_names_its_identity() -> None:
    assert guard().identify(None, certificate()).name == "alice"
    names = (("DNS", "host.example"), ("email", "alice@example.com"), ("URI", "spiffe://example/alice"))
    by_san = guard(certificate_names="san")
    assert by_san.identify(None, certificate(subjectAltName=names)).name == "spiffe://example/alice"
    assert by_san.identify(None, certificate(subjectAltName=names[:2])).name == "alice@example.com"
    assert by_san.identify(None, certificate(subjectAltName=names[:1])).name == "host.example"


@pytest.mark.parametrize("name", [None, "", "anonymous", "role:admin", "a b", "alíce", "аlice", "x" * 129, "*", "a\n"])
def test_a_certificate_without_a_usable_name_is_refused(name: str | None) -> None:
    with pytest.raises(Unauthorized):
        guard().identify(None, certificate(name))


def test_an_expired_certificate_is_refused_on_a_connection_that_is_open() -> None:
    with pytest.raises(Unauthorized, match="expired"):
        guard().identify(None, certificate(notAfter="Jan  1 00:00:00 2020 GMT"))


def test_a_token_is_preferred_and_a_wrong_one_is_not_replaced_by_the_certificate() -> None:
    assert guard().identify(HEADER, certificate("bob")).name == "alice"
    with pytest.raises(Unauthorized):
        guard().identify("Bearer wrong", certificate("bob"))


def test_without_security_everything_is_permitted_and_credentials_are_ignored() -> None:
    off = guard(None)
    rights = off.rights(off.identify("Bearer wrong", None))
    rights.require("admin")
    rights.require_credentials()
    assert rights.subjects("read", "orders", (">",)) is None
    assert rights.owner == ""


def test_security_that_is_required_and_not_enabled_yet_permits_nothing() -> None:
    waiting = guard(None, is_required=True)
    with pytest.raises(NotReady):
        waiting.identify(HEADER, None)
    with pytest.raises(NotReady):
        waiting.rights(NO_CREDENTIALS).require_credentials()


def test_rights_of_a_limited_identity() -> None:
    rights = guard().rights(Identity("alice"))
    assert rights.limits("read", "orders", ("orders.>",)) == ("orders.eu.>",)
    assert rights.limits("read", "orders", ("orders.eu.a",)) is None
    for recorded in (("orders.us.>",), ("returns",)):
        with pytest.raises(Forbidden):
            rights.limits("read", "orders", recorded)
    with pytest.raises(Forbidden):
        rights.limits("read", "returns", ("orders.eu.>",))
    with pytest.raises(Forbidden, match="natslog acl add alice manage orders"):
        rights.limits("manage", "orders", ("orders.>",))
    with pytest.raises(Forbidden, match="only on the subjects orders.eu.>"):
        rights.require_whole("read", "orders", ("orders.>",))
    assert rights.may_see("orders", ("orders.>",))
    assert not rights.may_see("orders", ("returns",))


def test_rules_are_applied_as_they_are_now() -> None:
    state: list[Security] = [SECURITY]
    changing = Guard(lambda: state[0], lambda: NOW_US)
    rights = changing.rights(Identity("alice"))
    assert rights.subjects("read", "orders", ("orders.eu.a",)) is None
    state[0] = replace(SECURITY, rules={})
    assert rights.subjects("read", "orders", ("orders.eu.a",)) == ()


@pytest.mark.parametrize("name", ["alice", "alice@example.com", "spiffe://a/b-1", "CN=x", "a", "x" * 128])
def test_names_of_identities(name: str) -> None:
    assert check_identity(name) == name


@pytest.mark.parametrize("name", ["", "x" * 129, "-a", "a-", "role:x", "a b", "a\x00", "ａ", "*", None, 7, ["a"]])
def test_names_that_are_not_identities(name: object) -> None:
    with pytest.raises(InvalidRequest):
        check_identity(name)


@pytest.mark.parametrize("who", ["", "role:", "role:a b", "role:*", "**", None, 7])
def test_a_rule_is_for_someone(who: object) -> None:
    with pytest.raises(InvalidRequest):
        check_who(who)


@pytest.mark.parametrize("pattern", ["", "[a-z]", "a/b", "a b", "x" * 256, "ａ*", None])
def test_stream_patterns_that_are_refused(pattern: object) -> None:
    with pytest.raises(InvalidRequest):
        check_stream_pattern(pattern)
