"""The leafnode protocol: lines in pieces of any size, messages that are skipped, and what is not accepted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.errors import ConfigError
from natslog.wire import leaf_protocol
from natslog.wire.credentials import Login
from natslog.wire.leaf_protocol import (
    LeafAddress,
    LeafProtocolError,
    LeafReader,
    Permissions,
    addresses_in,
    connect_line,
    info_of,
    subscription_of,
)

PAYLOADS = st.binary(max_size=20) | st.sampled_from([b"", b"\r\n", b"LS+ no\r\n", b"LMSG a 5\r\n", b"\r"])


@st.composite
def lines_and_messages(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """What a server sends, and the lines in it."""
    sent, lines = b"", []
    for _ in range(draw(st.integers(0, 8))):
        if draw(st.booleans()):
            line = draw(st.sampled_from([b"LS+ a.b", b"LS- a", b"PING", b"LS+ x g 3", b"-ERR 'no'", b"", b"a\rb"]))
            sent, lines = sent + line + b"\r\n", [*lines, line]
        else:
            payload = draw(PAYLOADS)
            head = draw(st.sampled_from([b"LMSG a %d", b"LMSG a r %d", b"LMSG a | g %d", b"HMSG a + r g 0 %d"]))
            sent += head % len(payload) + b"\r\n" + payload + b"\r\n"
    return sent, lines


@given(lines_and_messages(), st.lists(st.integers(1, 9)))
def test_lines_are_the_same_in_pieces_of_any_size(stream: tuple[bytes, list[bytes]], sizes: list[int]) -> None:
    sent, lines = stream
    reader, found, position = LeafReader(), [], 0
    for size in [*sizes, len(sent)]:
        found += reader.receive_data(sent[position : position + size])
        position += size
    assert found == lines
    assert reader.is_between_lines
    byte_by_byte = LeafReader()
    assert [line for at in range(len(sent)) for line in byte_by_byte.receive_data(sent[at : at + 1])] == lines
    with_a_tail = LeafReader()
    assert list(with_a_tail.receive_data(sent + b"LS+ hal")) == lines
    assert not with_a_tail.is_between_lines
    assert list(with_a_tail.receive_data(b"f\r\n")) == [b"LS+ half"]


def test_line_that_does_not_end_is_refused() -> None:
    reader = LeafReader()
    assert list(reader.receive_data(b"x" * leaf_protocol.MAX_LINE_BYTES)) == []
    with pytest.raises(LeafProtocolError, match="a line of more than"):
        list(reader.receive_data(b"x"))


@pytest.mark.parametrize("line", [b"LMSG a b\r\n", b"LMSG \r\n", b"HMSG a 1 -2\r\n", b"LMSG a 99999999999\r\n"])
def test_message_without_a_size_is_refused(line: bytes) -> None:
    with pytest.raises(LeafProtocolError, match="without a size"):
        list(LeafReader().receive_data(line))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"LS+ a.b", ("a.b", None, 1)),
        (b"LS+ a.b workers 12", ("a.b", "workers", 12)),
        (b"LS- a.b workers", ("a.b", "workers", 1)),
        ("LS+ für.alle".encode(), ("für.alle", None, 1)),
        (b"LS+ \xff", ("\udcff", None, 1)),
    ],
)
def test_subscription_lines(line: bytes, found: tuple[str, str | None, int]) -> None:
    assert subscription_of(line) == found


@pytest.mark.parametrize("line", [b"LS+ ", b"LS+ a b c d", b"LS+ a b c", b"LS+ a b -1", b"LS+ a b 9999999999"])
def test_other_subscription_lines_are_refused(line: bytes) -> None:
    with pytest.raises(LeafProtocolError, match="not a subscription"):
        subscription_of(line)


@pytest.mark.parametrize("line", [b"INFO", b"INFO {", b'INFO {"client_id": "x"}', b"INFO []", b"INFO \xff"])
def test_info_that_is_not_valid_is_refused(line: bytes) -> None:
    with pytest.raises(LeafProtocolError, match="INFO"):
        info_of(line)


@pytest.mark.parametrize(
    ("exported", "permitted", "refused"),
    [
        ({}, ["a", "b"], []),
        ({"export": {}}, ["a", "b"], []),
        ({"export": {"allow": ["in.*", "x"]}}, ["in.a", "x"], ["in", "in.a.b", "y"]),
        ({"export": {"deny": ["in.>"]}}, ["a", "in"], ["in.a", "in.a.b"]),
        ({"export": {"allow": ["in.>"], "deny": ["in.secret"]}}, ["in.a"], ["in.secret", "a"]),
    ],
)
def test_permissions(exported: dict[str, object], permitted: list[str], refused: list[str]) -> None:
    permissions = Permissions(info_of(b"INFO " + json.dumps(exported).encode()).exported)
    assert [one for one in permitted + refused if permissions.permit(one)] == permitted


# ---- addresses and logins ----

PLAIN = LeafAddress("nats-leaf://a:7422", "a", 7422, False, None, None)


@pytest.mark.parametrize(
    ("urls", "found"),
    [
        ("nats-leaf://a", [PLAIN]),
        ("a", [PLAIN]),
        ("nats://a:1, tls://b", [replace(PLAIN, port=1), replace(PLAIN, host="b", wants_tls=True)]),
        ("nats-leaf://me:p%40ss@a:7422", [replace(PLAIN, user="me", password="p@ss")]),
        ("nats-leaf://token@[::1]:9", [replace(PLAIN, host="::1", port=9, user="token")]),
    ],
)
def test_addresses(urls: str, found: list[LeafAddress]) -> None:
    assert [replace(one, shown=PLAIN.shown) for one in addresses_in(urls)] == found


@pytest.mark.parametrize("urls", ["", " , ", "http://a", "ws://u:SECRET@a", "nats://:1", "nats://a:SECRET", "a:99999"])
def test_other_addresses_are_refused(urls: str) -> None:
    with pytest.raises(ConfigError, match="nats_leaf_url") as refused:
        addresses_in(urls)
    assert "u:SECRET" not in refused.value.message


def test_addresses_are_shown_without_secrets() -> None:
    assert "SECRET" not in repr(addresses_in("nats://me:SECRET@a"))


@pytest.mark.parametrize(
    ("url", "login", "fields"),
    [
        ("nats://a", Login(), {}),
        ("nats://me:pw@a", Login(), {"user": "me", "pass": "pw"}),
        ("nats://t0k@a", Login(), {"user": "t0k", "auth_token": "t0k"}),
        ("nats://a", Login(user="me", password="pw"), {"user": "me", "pass": "pw"}),
        ("nats://me:pw@a", Login(token="t0k"), {"user": "me", "pass": "pw"}),
        ("nats://a", Login(token="t0k"), {"auth_token": "t0k"}),
    ],
)
def test_connect_line_has_the_login_and_asks_for_no_compression(url: str, login: Login, fields: dict[str, str]) -> None:
    info = info_of(b'INFO {"version": "2.99.0", "compression": "s2_auto"}')
    line = connect_line(info, addresses_in(url)[0], login, name="n", server_id="S")
    assert line.startswith(b"CONNECT ")
    assert line.endswith(b"\r\n")
    always = {"name": "n", "server_id": "S", "version": "2.99.0", "headers": True, "protocol": 1}
    assert json.loads(line[8:]) == always | fields
