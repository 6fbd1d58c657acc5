"""Where the token goes: to servers that were given, and to members of their cluster, over the same scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from natslog.client import ClientOptions, NatslogClient, asking
from natslog.client.credentials import read_token
from natslog.errors import NatslogError
from tests.unit.client.answering import Answers, leader, serving

TOKEN = "Bearer s3cret"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "LEADER_WITHIN_S", 0.2)


@pytest.fixture
def serve() -> Iterator[Callable[[Answers], str]]:
    with serving() as start:
        yield start


def client_of(*urls: str) -> NatslogClient:
    return NatslogClient(urls, ClientOptions(retries=0, timeout_s=2, retry_interval_s=0.05, token="s3cret"))


def members(*urls: str | None) -> tuple[int, Any, dict[str, str]]:
    return 200, {"brokers": [{"id": number, "url": url} for number, url in enumerate(urls)]}, {}


def pointing_to(url: str, cluster: tuple[int, Any, dict[str, str]]) -> Answers:
    return Answers(orders=(307, b"", {"Location": f"{url}/v1/streams/orders"}), cluster=cluster)


def test_token_follows_a_redirect_to_a_member_that_the_given_server_names(serve: Callable[[Answers], str]) -> None:
    there = leader(1, 10)
    url = serve(there)
    first = pointing_to(url, members(None, url))
    with client_of(serve(first)) as client:
        for _ in range(3):
            assert client.position("orders")["high_watermark"] == 10
    assert there.authorizations("orders") == [TOKEN] * 3
    assert first.authorizations("cluster") == [TOKEN], "the list of members is asked for once"


@pytest.mark.parametrize(
    "cluster", [members("http://127.0.0.1:1"), (500, b"<html>", {}), (200, [1], {}), (200, b"\xff", {})]
)
def test_token_does_not_follow_a_redirect_to_another_origin(
    serve: Callable[[Answers], str], cluster: tuple[int, Any, dict[str, str]]
) -> None:
    there = leader(1, 10)
    first = pointing_to(serve(there), cluster)
    with client_of(serve(first)) as client:
        client.position("orders")
    assert first.authorizations("orders") == [TOKEN]
    assert there.authorizations("orders") == [None]


def test_token_does_not_follow_where_only_the_other_origin_names_itself(serve: Callable[[Answers], str]) -> None:
    there = leader(1, 10)
    url = serve(there)
    there.calls["cluster"] = members(url)
    first = pointing_to(url, (307, b"", {"Location": f"{url}/v1/cluster"}))
    with client_of(serve(first)) as client:
        client.position("orders")
    assert there.authorizations("orders") == [None]
    assert there.authorizations("cluster") == [], "it is not asked who belongs to the cluster"


def test_token_does_not_go_to_a_member_over_another_scheme(serve: Callable[[Answers], str]) -> None:
    there = leader(1, 10)
    url = serve(there)
    first = pointing_to(url, members(url.replace("http:", "https:")))
    with client_of(serve(first)) as client:
        client.position("orders")
    assert there.authorizations("orders") == [None]


def test_token_does_not_go_to_a_preferred_url_that_is_no_member(serve: Callable[[Answers], str]) -> None:
    stranger, member, given = leader(1, 10), leader(1, 10), leader(1, 10)
    member_url = serve(member)
    given.calls["cluster"] = members(member_url)
    with client_of(serve(given)) as client:
        client.fetch("orders", 10, prefer=[serve(stranger)])
        client.fetch("orders", 10, prefer=[member_url])
    assert stranger.authorizations("messages") == [None]
    assert member.authorizations("messages") == [TOKEN]


def test_refusal_without_the_token_says_that_it_was_not_sent(serve: Callable[[Answers], str]) -> None:
    url = serve(Answers(orders=(401, b"", {})))
    with (
        client_of(serve(pointing_to(url, members()))) as client,
        pytest.raises(
            NatslogError, match=f"{url} requires credentials, but the token was not sent.*add it to the servers"
        ),
    ):
        client.stream("orders")


def test_user_and_password_of_a_server_url_go_nowhere(serve: Callable[[Answers], str]) -> None:
    there = leader(1, 10)
    first = pointing_to(serve(there), members())
    given = serve(first).replace("http://", "http://user:s3cret@")
    with NatslogClient(given, ClientOptions(retries=0, timeout_s=2)) as client:
        client.position("orders")
    assert there.authorizations("orders") == [None]


@pytest.mark.parametrize(("mode", "is_warned"), [(0o600, False), (0o400, False), (0o644, True), (0o660, True)])
def test_token_file_that_others_can_read_is_used_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_warned: bool
) -> None:
    file = tmp_path / "token"
    file.write_text("nlt_x\n")
    file.chmod(mode)
    assert read_token(None, str(file)) == "nlt_x"
    assert ("chmod 600" in caplog.text) is is_warned
