"""When a broker serves the JetStream API, and where: settings, security, permissions, a server with JetStream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.errors import NoRespondersError, TimeoutError

from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, all_values, eventually, flushed, natslog, publish_acked, with_nats

PERMISSIONS = """
accounts {{ APP {{ users = [
  {{ user: broker, password: b, permissions: {{ publish: {publish}, subscribe: {subscribe} }} }}
  {{ user: client, password: c }}
] }} }}
"""


@contextmanager
def served(folder: Path, *, server: tuple[str, ...] = (), user: str = "", **settings: Any) -> Iterator[tuple[str, Any]]:
    """The URL of a NATS server for clients, and a broker on it."""
    folder.mkdir(parents=True, exist_ok=True)
    nats = NatsServer(0, folder / "nats.log", arguments=server).start()
    broker = BrokerProcess(folder / "own", nats.url.replace("//", f"//{user}"), **settings)
    try:
        yield nats.url.replace("//", "//client:c@" if user else "//"), broker.start()
    finally:
        broker.kill()
        nats.stop()


def info(url: str, prefix: str = "$JS.API") -> dict[str, Any] | None:
    """None: no broker and no server answers."""

    async def work(connection: Any) -> dict[str, Any] | None:
        try:
            return dict(json.loads((await connection.request(f"{prefix}.INFO", b"", timeout=2)).data))
        except (NoRespondersError, TimeoutError):
            return None

    return with_nats(url, work)


def state_of(broker: BrokerProcess) -> str:
    return str(broker.client().cluster()["jetstream"])


@pytest.mark.long
def test_setting_turns_it_off(tmp_path: Path) -> None:
    with served(tmp_path, jetstream="off") as (url, broker):
        broker.client().create_stream("a", "a")
        assert publish_acked(url, "a", [b"x"])[0]["seq"] == 1
        assert info(url) is None
        assert "JetStream API: off" in natslog("cluster", "status", url=broker.url).stdout


def test_wrong_setting_is_refused(tmp_path: Path) -> None:
    done = natslog("server", "--data-dir", str(tmp_path / "x"), "--jetstream", "yes", check=False)
    assert done.returncode != 0
    assert "jetstream" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(("mode", "state"), [("auto", "off"), ("on", "on")])
def test_with_security_it_is_served_only_on_request(tmp_path: Path, mode: str, state: str) -> None:
    with served(tmp_path, jetstream=mode, admin_token_file=tmp_path / "token") as (url, broker):
        broker.terminate()
        broker.environment = {"NATSLOG_SECURITY": "true", "NATSLOG_INSECURE": "false"}
        broker.start()
        if state == "on":
            eventually(lambda: info(url), what="the API is served")
        else:
            assert info(url) is None
            reason = "the JetStream API is off, because security is enabled"
            eventually(lambda: reason in broker.output(), what="the broker logs why")


@pytest.mark.long
def test_one_of_two_clusters_in_an_account_serves_it(tmp_path: Path) -> None:
    """Otherwise each request would have two answers, of which a client takes any."""
    with served(tmp_path / "first") as (url, first):
        eventually(lambda: state_of(first) == "on", what="the first one serves the API")
        second = BrokerProcess(tmp_path / "second", url).start()
        try:
            eventually(lambda: state_of(second) == "conflict", what="the second one notices the first")
            assert "another natslog cluster serves it" in natslog("cluster", "status", url=second.url).stdout
            assert "set jetstream = off for one of them" in second.output()

            async def work(connection: Any) -> list[str]:
                inbox = connection.new_inbox()
                answers = await connection.subscribe(inbox)
                await connection.publish("$JS.API.STREAM.NAMES", b"", reply=inbox)
                found = [(await answers.next_msg(30)).data.decode()]
                await connection.request("$JS.API.INFO", b"", timeout=30)  # answered after the other request
                return found + [(await answers.next_msg(0)).data.decode() for _ in range(answers.pending_msgs)]

            assert len(with_nats(url, work)) == 1
            first.terminate()
            second.terminate()
            second.start()
            eventually(lambda: state_of(second) == "on", what="it is alone")
        finally:
            second.kill()


@pytest.mark.long
def test_server_with_jetstream_keeps_its_api_and_natslog_has_a_domain(tmp_path: Path) -> None:
    with served(tmp_path, server=("--jetstream", "--store_dir", str(tmp_path / "js"))) as (url, broker):
        eventually(lambda: state_of(broker) == "domain", what="the server's JetStream is noticed")
        assert "only in the domain natslog" in natslog("cluster", "status", url=broker.url).stdout

        async def work(connection: Any) -> tuple[list[str], list[str], bytes]:
            theirs, ours = connection.jetstream(), connection.jetstream(domain="natslog")
            await theirs.add_stream(name="theirs", subjects=["theirs"])
            await ours.add_stream(name="ours", subjects=["ours"], allow_direct=True)
            assert (await ours.publish("ours", b"x")).domain == "natslog"
            assert (await ours.publish("ours", b"y", headers={"A": "1"})).domain == "natslog"
            for call in ("INFO", "STREAM.INFO.ours"):
                answer = await connection.request(f"$JS.natslog.API.{call}", b"", timeout=10)
                assert json.loads(answer.data)["domain"] == "natslog"
            found = await ours.get_msg("ours", 1, direct=True)
            return (
                [one.config.name for one in await theirs.streams_info()],
                [one.config.name for one in await ours.streams_info()],
                found.data,
            )

        assert with_nats(url, work) == (["theirs"], ["ours"], b"x")
        assert all_values(broker.client(), "ours") == [b"x", b"y"]


ALL = '["$JS.API.INFO", "_INBOX.>"]', '["$JS.API.>", "_INBOX.natslog.>", "a"]'


@pytest.mark.long
@pytest.mark.parametrize(
    ("publish", "subscribe", "state"),
    [
        (*ALL, "on"),
        ('["_INBOX.>"]', ALL[1], "forbidden"),
        (ALL[0], '["_INBOX.natslog.>", "a"]', "forbidden"),
        (ALL[0], '["$JS.API.>", "a"]', "forbidden"),
    ],
)
def test_permissions_of_the_brokers_user(tmp_path: Path, publish: str, subscribe: str, state: str) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(PERMISSIONS.format(publish=publish, subscribe=subscribe))
    with served(tmp_path / "x", server=("-c", str(config)), user="broker:b@") as (url, broker):
        eventually(lambda: state_of(broker) == state, what=state)
        broker.client().create_stream("a", "a")
        assert publish_acked(url, "a", [b"x"])[0]["seq"] == 1
        assert (info(url) is not None) == (state == "on")
        assert ("lacks permissions" in broker.output()) == (state == "forbidden")


@pytest.mark.long
def test_brokers_that_look_for_other_clusters_read_no_streams(tmp_path: Path) -> None:
    """They do it every ten seconds: the size of each stream would be read each time."""

    async def probe(connection: Any) -> tuple[dict[str, str], bytes, dict[str, Any]]:
        subscription = await connection.subscribe("$JS.API.INFO")
        probed = await subscription.next_msg(timeout=30)
        answer = await connection.request("$JS.API.INFO", headers=probed.headers, timeout=30)
        return dict(probed.headers or {}), bytes(probed.data), json.loads(answer.data)

    with served(tmp_path) as (url, broker):
        eventually(lambda: info(url), what="the API is served")
        broker.client().create_stream("a", "a")
        headers, payload, answer = with_nats(url, probe)
        assert (headers, payload) == ({"Natslog-Probe": "true"}, b"")
        assert answer.keys() == {"type", "api"}, "no numbers of streams"
        full = info(url)
        assert full is not None
        assert full["streams"] == 1


@pytest.mark.long
def test_restarted_server_gets_the_subscriptions_again(tmp_path: Path) -> None:
    nats = NatsServer(0, tmp_path / "nats.log").start()
    port = nats.port
    broker = BrokerProcess(tmp_path / "own", nats.url).start()
    try:
        eventually(lambda: info(nats.url), what="the API is served")
        nats.stop()
        nats = NatsServer(port, tmp_path / "nats.log").start()
        eventually(lambda: info(nats.url), what="the API is served again")
        nats.stop()
        store = ("--jetstream", "--store_dir", str(tmp_path / "js"))
        nats = NatsServer(port, tmp_path / "nats.log", arguments=store).start()
        eventually(lambda: state_of(broker) == "domain", what="the server has JetStream now")
        eventually(lambda: info(nats.url, "$JS.natslog.API"), what="the domain is served")
    finally:
        broker.kill()
        nats.stop()


def test_acks_are_no_requests_and_no_messages(tmp_path: Path) -> None:
    """A publisher chooses the reply subject, and the broker may publish anywhere."""
    with served(tmp_path) as (url, broker):
        eventually(lambda: info(url), what="the API is served")

        async def work(connection: Any) -> list[int]:
            js = connection.jetstream()
            for name in ("a", "b"):
                await js.add_stream(name=name, subjects=[name])
            await js.publish("b", b"kept")
            for reply in ("b", "$JS.API.STREAM.PURGE.b", "$JS.API.STREAM.DELETE.b", "my.inbox", "a.*"):
                answers = await connection.subscribe("my.inbox")
                await connection.publish("a", b"", reply=reply)
                if reply == "my.inbox":
                    assert json.loads((await answers.next_msg(timeout=30)).data) == {"stream": "a", "seq": 4}
            direct = {"seq": 1}
            for reply in ("b", "$JS.API.STREAM.DELETE.b"):
                await connection.publish("$JS.API.STREAM.MSG.GET.a", json.dumps(direct).encode(), reply=reply)
            await flushed(connection)
            return [(await js.stream_info(name)).state.messages for name in ("a", "b")]

        messages = with_nats(url, work)
        assert messages[0] >= 4
        assert all_values(broker.client(), "b")[0] == b"kept"
