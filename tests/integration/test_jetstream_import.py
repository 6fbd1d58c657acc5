"""Streams of a NATS server with JetStream, copied into a natslog cluster: `natslog import --from-jetstream`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import nats
import pyarrow as pa
import pytest
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from natslog.client import NatslogClient
from natslog.errors import MigrationFailed, StreamConflict, StreamNotFound
from natslog.migration.importing import MigrationOptions, migrate
from natslog.migration.receiving import Receiving
from natslog.migration.source import JetStreamSource, SourceInfo
from natslog.nats_server import NatsServer
from natslog.times import parse_timestamp_us
from tests.harness import BrokerProcess, eventually, flushed, natslog, with_nats

DOMAIN = "$JS.natslog.API"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsServer, BrokerProcess]]:
    """One NATS server with JetStream, and a broker beside it, whose API is in the domain `natslog`."""
    folder = tmp_path_factory.mktemp("beside")
    store = ("--jetstream", "--store_dir", str(folder / "store"))
    server = NatsServer(0, folder / "nats.log", arguments=store).start()
    broker = BrokerProcess(folder / "broker", server.url, nats_leaf_url=server.leaf_url).start()
    yield server, broker
    broker.terminate()
    server.stop()


@pytest.fixture
def source(servers: tuple[NatsServer, BrokerProcess]) -> str:
    return servers[0].url


@pytest.fixture
def broker(servers: tuple[NatsServer, BrokerProcess]) -> BrokerProcess:
    return servers[1]


async def api(connection: Any, call: str, body: Any = None, prefix: str = "$JS.API") -> dict[str, Any]:
    payload = b"" if body is None else json.dumps(body).encode()
    answer = json.loads((await connection.request(f"{prefix}.{call}", payload, timeout=30)).data)
    assert "error" not in answer, answer
    return dict(answer)


async def created(connection: Any, name: str, **config: Any) -> dict[str, Any]:
    return await api(connection, f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"]} | config)


async def moved(connection: Any, name: str) -> None:
    """JetStream records the subjects of this stream no more."""
    config = (await api(connection, f"STREAM.INFO.{name}"))["config"]
    await api(connection, f"STREAM.UPDATE.{name}", config | {"subjects": [f"moved.{name}"]})


async def published(connection: Any, subject: str, values: list[bytes], headers: Any = None) -> None:
    for value in values:
        answer = json.loads((await connection.request(subject, value, timeout=30, headers=headers)).data)
        assert "error" not in answer, answer


async def stored(connection: Any, name: str, prefix: str = "$JS.API") -> dict[int, tuple[str, str, str, int]]:
    """Every message that JetStream has: sequence → subject, headers, payload, time."""
    state = (await api(connection, f"STREAM.INFO.{name}", {"deleted_details": True}, prefix))["state"]
    found = {}
    for seq in range(max(1, state["first_seq"]), state["last_seq"] + 1):
        if seq not in state.get("deleted", ()):
            message = (await api(connection, f"STREAM.MSG.GET.{name}", {"seq": seq}, prefix))["message"]
            headers = b64decode(message.get("hdrs", "")).decode()
            data = b64decode(message.get("data", "")).hex()
            whole_us = re.sub(r"(\.\d{6})\d+", r"\1", message["time"])  # the rest of the nanoseconds is cut
            found[seq] = (message["subject"], headers, data, parse_timestamp_us(whole_us))
    return found


def rows(client: NatslogClient, stream: str) -> dict[int, tuple[str, str, str, int]]:
    """The same of the natslog stream."""
    found = {}
    for row in pa.Table.from_batches(list(client.read(stream))).to_pylist():
        lines = "".join(f"{one['key']}: {one['value']}\r\n" for one in row["headers"] or ())
        headers = "" if row["headers"] is None else f"NATS/1.0\r\n{lines}\r\n"
        time_us = parse_timestamp_us(row["timestamp"].isoformat())
        found[row["offset"] + 1] = (row["subject"], headers, row["value"].hex(), time_us)
    return found


def migrated(source: str, broker: BrokerProcess, name: str, *options: str, check: bool = True) -> Any:
    done = natslog("import", "--from-jetstream", source, name, *options, "--json", url=broker.url, check=check)
    return json.loads(done.stdout) if check else done


async def switched_over(connection: Any, source: str, broker: BrokerProcess, name: str) -> Any:
    await asyncio.to_thread(migrated, source, broker, name, "--no-follow")
    await moved(connection, name)
    return await asyncio.to_thread(migrated, source, broker, name, "--switch-over")


@contextmanager
def running(source: str, broker: BrokerProcess, name: str, log: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command while it follows."""
    command = [sys.executable, "-m", "natslog", "--server", broker.url, "import", "--from-jetstream", source, name]
    with open(log, "w") as file:
        process = subprocess.Popen([*command, *options], stdout=file, stderr=file, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def next_offset(client: NatslogClient, name: str) -> int:
    try:
        return int(client.import_state(name)["next_offset"])
    except StreamNotFound:
        return -1


# ---- copies ----


def test_copy_has_the_messages_of_the_source_at_their_sequences(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    """Headers, empty and binary payloads, many subjects, former subjects, deleted messages at both ends and between."""

    async def fill(connection: Any) -> dict[int, Any]:
        await created(connection, name, first_seq=7, subjects=[f"{name}.>", f"{name}-old.*"], max_msgs=500)
        await published(connection, f"{name}-old.a", [b"former"])
        for at in range(300):
            await connection.publish(f"{name}.{at % 97}.{at}", b"%d" % at * (at % 5))
        await flushed(connection)
        await published(connection, f"{name}.binary", [bytes(range(256)), b"", b"\r\n+OK\r\n" * 1000])
        several = {
            "Nats-Msg-Id": "m1",
            "Nats-Expected-Stream": name,
            "Empty": "",
            "Place": "Zürich",
            "Natslog-Key": "k",
        }
        await published(connection, f"{name}.headers", [b"with"], several | {"Nats-Msg-Id": "m2"})
        await published(connection, f"{name}.headers", [b""], {"Only": "one"})
        await published(connection, f"{name}.headers", [b"x" * 200_000], several)
        await published(connection, f"{name}.last", [b"deleted"])
        config = (await api(connection, f"STREAM.INFO.{name}"))["config"]
        await api(connection, f"STREAM.UPDATE.{name}", config | {"subjects": [f"{name}.>"]})
        last = (await api(connection, f"STREAM.INFO.{name}"))["state"]["last_seq"]
        for seq in (7, 9, 10, 11, 150, last):
            await api(connection, f"STREAM.MSG.DELETE.{name}", {"seq": seq})
        await api(connection, f"STREAM.PURGE.{name}", {"filter": f"{name}.5.>"})
        return await stored(connection, name)

    expected = with_nats(source, fill)
    done = migrated(source, broker, name, "--no-follow")
    assert (done["first_offset"], done["messages"], done["resumed"]) == (7, len(expected), False)
    assert done["end_offset"] == max(expected) + 1, "the last message was deleted"
    assert rows(client, name) == expected
    shown = client.stream(name)
    assert (shown["subjects"], shown["max_messages"], shown["acks"]) == ([f"{name}.>"], 500, "any")
    assert shown["former_subjects"] == [f"{name}-old.a"] or not any("-old" in one[0] for one in expected.values())
    assert shown["paused"]
    again = migrated(source, broker, name, "--no-follow")
    assert (again["messages"], again["end_offset"]) == (0, done["end_offset"])


@pytest.mark.long
def test_messages_removed_between_two_copies_are_removed_in_natslog(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    async def fill(connection: Any) -> None:
        await created(connection, name, max_msgs_per_subject=1)
        await published(connection, f"{name}.a", [b"1"])
        await published(connection, f"{name}.b", [b"2"])
        await published(connection, f"{name}.c", [b"3"])

    async def change(connection: Any) -> dict[int, Any]:
        await published(connection, f"{name}.a", [b"4"])  # the limit per subject removes the first one
        await api(connection, f"STREAM.MSG.DELETE.{name}", {"seq": 2})
        return await stored(connection, name)

    with_nats(source, fill)
    assert migrated(source, broker, name, "--no-follow")["messages"] == 3
    assert sorted(rows(client, name)) == [1, 2, 3]
    expected = with_nats(source, change)
    done = migrated(source, broker, name, "--no-follow")
    assert (done["messages"], done["removed"]) == (1, 2)
    assert rows(client, name) == expected
    assert sorted(expected) == [3, 4]


def test_empty_stream_is_copied_with_its_settings(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    with_nats(source, lambda one: created(one, name, first_seq=100, max_age=3_600_000_000_000, allow_msg_ttl=True))
    done = migrated(source, broker, name, "--no-follow")
    assert (done["first_offset"], done["end_offset"], done["messages"]) == (99, 99, 0)
    assert (client.stream(name)["ttl"], client.stream(name)["allow_ttl"]) == ("1h", True)


def test_copy_into_a_stream_of_another_name_keeps_its_subjects(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    async def fill(connection: Any) -> None:
        await created(connection, name)
        await published(connection, f"{name}.a", [b"1"])

    with_nats(source, fill)
    assert migrated(source, broker, name, "--no-follow", "--as", f"{name}-2")["stream"] == f"{name}-2"
    assert client.stream(f"{name}-2")["subjects"] == [f"{name}.>"]


@pytest.mark.long
def test_work_queue_is_copied_without_removing_its_messages(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    async def fill(connection: Any) -> dict[int, Any]:
        await created(connection, name, retention="workqueue")
        await published(connection, f"{name}.a", [b"%d" % at for at in range(10)])
        config = {"durable_name": "w", "ack_policy": "explicit"}
        await api(connection, f"CONSUMER.DURABLE.CREATE.{name}.w", {"stream_name": name, "config": config})
        return await stored(connection, name)

    expected = with_nats(source, fill)
    migrated(source, broker, name, "--no-follow")
    assert rows(client, name) == expected
    assert with_nats(source, lambda one: stored(one, name)) == expected


# ---- interruptions ----


@pytest.mark.long
def test_copy_continues_after_sigkill_in_the_middle(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str, tmp_path: Path
) -> None:
    """While messages are published."""

    async def fill(connection: Any) -> None:
        await created(connection, name)
        for at in range(20_000):
            await connection.publish(f"{name}.{at}", b"%d " % at * 100)
        await flushed(connection)

    async def more(connection: Any) -> None:
        await published(connection, f"{name}.more", [b"%d" % at for at in range(10)])

    with_nats(source, fill)
    kills = 0
    while next_offset(client, name) < 20_000:
        begun = next_offset(client, name)
        with running(source, broker, name, tmp_path / f"{kills}.log") as process:
            eventually(lambda begun=begun: next_offset(client, name) > max(0, begun), what="a part is copied")
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    with_nats(source, more)
    with running(source, broker, name, tmp_path / "last.log"):
        eventually(lambda: next_offset(client, name) == 20_010, what="everything is copied")
    with_nats(source, more)
    assert migrated(source, broker, name, "--no-follow")["messages"] == 10
    found = rows(client, name)
    assert sorted(found) == list(range(1, 20_021))
    assert found == with_nats(source, lambda one: stored(one, name))


@pytest.mark.long
def test_copy_continues_after_a_restart_of_the_source(
    broker: BrokerProcess, client: NatslogClient, name: str, tmp_path: Path
) -> None:
    store = ("--jetstream", "--store_dir", str(tmp_path / "store"))
    server = NatsServer(0, tmp_path / "nats.log", arguments=store, has_leafnodes=False).start()

    async def fill(connection: Any, first: int) -> None:
        await published(connection, f"{name}.a", [b"%d" % at for at in range(first, first + 50)])

    try:
        with_nats(server.url, lambda one: created(one, name))
        with_nats(server.url, lambda one: fill(one, 0))
        with running(server.url, broker, name, tmp_path / "import.log") as process:
            eventually(lambda: next_offset(client, name) == 50, what="the first part is copied")
            server.stop()
            server.start()
            with_nats(server.url, lambda one: fill(one, 50))
            eventually(lambda: next_offset(client, name) == 100, what="the second part is copied")
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
        assert "the same command continues" in (tmp_path / "import.log").read_text()
    finally:
        server.stop()


# ---- the switch-over ----


@pytest.mark.long
def test_resuming_a_copy_of_a_stream_of_interest_removes_nothing_unasked(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    """Its consumers, which need the messages, come with the switch-over."""

    async def fill(connection: Any) -> None:
        await created(connection, name, retention="interest")
        config = {"durable_name": "worker", "ack_policy": "explicit"}
        await api(connection, f"CONSUMER.CREATE.{name}.worker", {"stream_name": name, "config": config})
        await published(connection, f"{name}.a", [b"1", b"2"])

    with_nats(source, fill)
    said = natslog("import", "--from-jetstream", source, name, "--no-follow", url=broker.url).stdout
    assert "until the switch-over" in said
    refused = natslog("stream", "resume", name, url=broker.url, check=False)
    assert refused.returncode != 0
    assert "messages that none of its consumers needs would be removed" in refused.stderr
    assert client.stream(name)["paused"]
    assert client.stream(name)["messages"] == 2
    natslog("stream", "resume", name, "--yes", url=broker.url)
    eventually(lambda: client.stream(name)["messages"] == 0, what="that is what it asked about")


def test_what_another_command_has_copied_meanwhile_is_no_loss(
    source: str, client: NatslogClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of JetStream is read before that of the copy, which another command may have taken further since."""

    async def fill_and_copy(connection: Any) -> None:
        await created(connection, name)
        await published(connection, f"{name}.a", [b"x"] * 20)
        options = MigrationOptions(url=source, stream=name, name=name, until="copied")
        await migrate(client, options)
        states, info = [15, 20], JetStreamSource.info

        async def late(self: JetStreamSource, **options: Any) -> SourceInfo:
            found = await info(self, **options)
            last = states.pop(0) if states else found.state.last_seq
            return msgspec.structs.replace(found, state=msgspec.structs.replace(found.state, last_seq=last))

        monkeypatch.setattr(JetStreamSource, "info", late)
        assert (await migrate(client, options)).end_offset == 20
        states[:] = [15, 15]
        with pytest.raises(StreamConflict, match="copied up to sequence 20, but JetStream has only 15"):
            await migrate(client, options)

    with_nats(source, fill_and_copy)


@pytest.mark.long
def test_switch_over_while_publishing_loses_and_doubles_nothing(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str, tmp_path: Path
) -> None:
    """A publisher that repeats what was not acked has every ack from one of both; the sequences continue."""
    acks: list[int] = []
    ends = asyncio.Event()

    async def publish(connection: Any) -> None:
        while not ends.is_set():
            at = len(acks)
            try:
                sent = connection.request(f"{name}.a", b"%d" % at, timeout=1, headers={"Nats-Msg-Id": f"m{at}"})
                acks.append(json.loads((await sent).data)["seq"])
            except (NoRespondersError, NatsTimeoutError):
                await asyncio.sleep(0.005)

    async def operate(connection: Any) -> None:
        publishing = asyncio.create_task(publish(connection))
        loop = asyncio.get_running_loop()

        async def until(condition: Any) -> None:
            await loop.run_in_executor(None, lambda: eventually(condition, 60))

        with running(source, broker, name, tmp_path / "follow.log") as follower:
            await until(lambda: next_offset(client, name) > 50)
            with running(source, broker, name, tmp_path / "switch.log", "--switch-over") as switching:
                await until(lambda: "nats stream edit" in (tmp_path / "switch.log").read_text())
                await moved(connection, name)
                assert await loop.run_in_executor(None, switching.wait, 60) == 0
            assert await loop.run_in_executor(None, follower.wait, 60) == 0
        switched = len(acks)
        await until(lambda: len(acks) > switched + 50)
        ends.set()
        await publishing

    with_nats(source, lambda one: created(one, name))
    with_nats(source, operate)
    assert acks == list(range(1, len(acks) + 1))
    found = rows(client, name)
    assert [bytes.fromhex(found[seq][2]) for seq in sorted(found)] == [b"%d" % at for at in range(len(acks))]
    assert "accepts messages" in (tmp_path / "switch.log").read_text()
    again = migrated(source, broker, name, "--switch-over")
    assert (again["messages"], again["resumed"]) == (0, True), "a repeated command changes nothing"


@pytest.mark.long
def test_switch_over_of_a_sealed_source_needs_no_wait(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    async def fill(connection: Any) -> None:
        config = (await created(connection, name))["config"]
        await published(connection, f"{name}.a", [b"1", b"2"])
        await asyncio.to_thread(migrated, source, broker, name, "--no-follow")
        await published(connection, f"{name}.a", [b"3"])
        await api(connection, f"STREAM.UPDATE.{name}", config | {"sealed": True})

    with_nats(source, fill)
    done = migrated(source, broker, name, "--switch-over")
    assert (done["messages"], done["resumed"]) == (1, True)
    assert sorted(rows(client, name)) == [1, 2, 3]
    assert not client.stream(name)["deny_delete"], "the settings are those from before the seal"


CONSUMERS: dict[str, dict[str, Any]] = {
    "explicit": {
        "ack_policy": "explicit",
        "max_ack_pending": 50,
        "description": "of a service",
        "metadata": {"a": "b"},
    },
    "all": {"ack_policy": "all", "ack_wait": 5_000_000_000},
    "none": {"ack_policy": "none"},
    "filtered": {"ack_policy": "explicit", "filter_subject": "{name}.even", "backoff": [10**9, 2 * 10**9]},
    "unused": {"ack_policy": "explicit", "deliver_policy": "by_start_sequence", "opt_start_seq": 15},
    "push": {"ack_policy": "explicit", "deliver_subject": "deliver.{name}", "deliver_group": "g"},
}


def configs_of(name: str) -> dict[str, dict[str, Any]]:
    text = json.dumps(CONSUMERS).replace("{name}", name)
    return {one: {"durable_name": one} | config for one, config in json.loads(text).items()}


async def fetched(connection: Any, name: str, consumer: str, count: int, prefix: str = "$JS.API") -> list[Any]:
    """Messages of a pull, at most so many."""
    inbox = connection.new_inbox()
    subscription = await connection.subscribe(inbox)
    request = json.dumps({"batch": count, "expires": 500_000_000}).encode()
    await connection.publish(f"{prefix}.CONSUMER.MSG.NEXT.{name}.{consumer}", request, reply=inbox)
    found: list[Any] = []
    while len(found) < count:
        message = await subscription.next_msg(timeout=30)
        if not message.reply:
            break
        found.append(message)
    await subscription.unsubscribe()
    return found


@pytest.mark.long
def test_consumers_continue_behind_their_ack_floor(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    async def work(connection: Any) -> None:
        await created(connection, name)
        for at in range(20):
            await published(connection, f"{name}.{'odd' if at % 2 else 'even'}", [b"%d" % at])
        for one, config in configs_of(name).items():
            request = {"stream_name": name, "config": config}
            await api(connection, f"CONSUMER.DURABLE.CREATE.{name}.{one}", request)
        ephemeral = {"ack_policy": "none", "inactive_threshold": 60 * 10**9, "name": "ephemeral"}
        request = {"stream_name": name, "config": ephemeral}
        await api(connection, f"CONSUMER.CREATE.{name}.ephemeral", request)
        messages = await fetched(connection, name, "explicit", 8)
        for at in (0, 1, 2, 5):  # 4 and 5 are pending
            await connection.request(messages[at].reply, b"+ACK", timeout=30)
        await connection.request((await fetched(connection, name, "all", 10))[5].reply, b"", timeout=30)
        await fetched(connection, name, "none", 4)
        for message in await fetched(connection, name, "filtered", 3):
            await connection.request(message.reply, b"+ACK", timeout=30)
        done = await switched_over(connection, source, broker, name)
        assert done["consumers"] == sorted(CONSUMERS)
        assert (done["refused"], done["others"]) == ([], ["ephemeral"])
        for one, config in configs_of(name).items():  # as a client does that finds its consumer
            request = {"stream_name": name, "config": config, "action": "create"}
            here = await api(connection, f"CONSUMER.DURABLE.CREATE.{name}.{one}", request, DOMAIN)
            there = await api(connection, f"CONSUMER.INFO.{name}.{one}")
            assert here["config"] == there["config"]
            assert parse_timestamp_us(here["created"]) == parse_timestamp_us(there["created"])
            floors = [{key: side["ack_floor"][key] for key in ("consumer_seq", "stream_seq")} for side in (here, there)]
            assert floors[0] == floors[1]
            pending = here["num_pending"] + here["num_ack_pending"]
            assert pending == there["num_pending"] + _between(there, one)
        expected = {"explicit": (4, 17), "all": (7, 14), "none": (5, 16), "filtered": (7, 7), "unused": (15, 6)}
        for one, (first, count) in expected.items():
            messages = await fetched(connection, name, one, 100, DOMAIN)
            seqs = [int(message.reply.split(".")[5]) for message in messages]
            assert (seqs[0], len(seqs)) == (first, count), one
            assert int(messages[0].reply.split(".")[4]) == 1
            for message in messages:
                await connection.publish(message.reply, b"+ACK")
        await api(connection, f"CONSUMER.DELETE.{name}.push")  # it would deliver to the same subject
        received: list[bytes] = []
        done_all = asyncio.Event()

        async def receive(message: Any) -> None:
            received.append(message.data)
            await connection.publish(message.reply, b"+ACK")
            if len(received) == 21:
                done_all.set()

        await connection.subscribe(f"deliver.{name}", queue="g", cb=receive)
        await published(connection, f"{name}.new", [b"new"])  # recorded by natslog now
        await asyncio.wait_for(done_all.wait(), 20)
        assert received[-1] == b"new"

    with_nats(source, work)


def _between(info: dict[str, Any], consumer: str) -> int:
    """Messages behind the ack floor that JetStream has delivered: they will be delivered again."""
    behind = info["delivered"]["stream_seq"] - info["ack_floor"]["stream_seq"]
    return behind // 2 if consumer == "filtered" else behind


@pytest.mark.long
def test_work_queue_continues_with_what_is_not_acked(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    async def work(connection: Any) -> None:
        await created(connection, name, retention="workqueue")
        await published(connection, f"{name}.a", [b"%d" % at for at in range(10)])
        config = {"durable_name": "w", "ack_policy": "explicit"}
        await api(connection, f"CONSUMER.DURABLE.CREATE.{name}.w", {"stream_name": name, "config": config})
        messages = await fetched(connection, name, "w", 6)
        for at in (0, 1, 4):
            await connection.request(messages[at].reply, b"+ACK", timeout=30)
        await switched_over(connection, source, broker, name)
        found = await fetched(connection, name, "w", 100, DOMAIN)
        assert [message.data for message in found] == [b"2", b"3", b"5", b"6", b"7", b"8", b"9"]
        for message in found:
            await connection.request(message.reply, b"+ACK", timeout=30)

        async def left() -> int:
            return int((await api(connection, f"STREAM.INFO.{name}", None, DOMAIN))["state"]["messages"])

        async with asyncio.timeout(20):
            while await left():  # noqa: ASYNC110 (another process removes them)
                await asyncio.sleep(0.02)

    with_nats(source, work)


@pytest.mark.long
def test_consumer_that_natslog_does_not_support_is_named(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    async def work(connection: Any) -> None:
        await created(connection, name)
        for one, extra in {"good": {}, "grouped": {"priority_policy": "overflow", "priority_groups": ["a"]}}.items():
            config = {"durable_name": one, "ack_policy": "explicit"} | extra
            await api(connection, f"CONSUMER.DURABLE.CREATE.{name}.{one}", {"stream_name": name, "config": config})

    with_nats(source, work)
    assert migrated(source, broker, name, "--no-follow")["stream"] == name
    with_nats(source, lambda one: moved(one, name))
    done = migrated(source, broker, name, "--switch-over", check=False)
    assert done.returncode == 1
    body = json.loads(done.stdout)
    assert (body["consumers"], body["refused"][0]["name"], body["resumed"]) == (["good"], "grouped", True)
    assert "priority groups" in body["refused"][0]["reason"]


@pytest.mark.long
def test_readers_continue_when_jetstream_is_disabled(name: str, tmp_path: Path) -> None:
    """The whole procedure with one NATS server: its configuration is reloaded without JetStream."""
    from natslog.nats_server import free_port

    leaf_port, conf = free_port(), tmp_path / "nats.conf"
    leaf = f"leafnodes {{ host: 127.0.0.1, port: {leaf_port} }}\n"
    conf.write_text(leaf + f"jetstream {{ store_dir: {tmp_path / 'store'} }}\n")
    server = NatsServer(0, tmp_path / "nats.log", arguments=("--config", str(conf))).start()
    broker = BrokerProcess(tmp_path / "broker", server.url, nats_leaf_url=f"nats-leaf://127.0.0.1:{leaf_port}").start()

    async def work(connection: Any) -> None:
        await created(connection, name)
        await published(connection, f"{name}.a", [b"%d" % at for at in range(10)])
        context = connection.jetstream()
        subscription = await context.pull_subscribe(f"{name}.a", "reader", stream=name)
        for message in await subscription.fetch(4, timeout=5):
            await message.ack_sync()
        await switched_over(connection, server.url, broker, name)
        conf.write_text(leaf)
        os.kill(server.pid, signal.SIGHUP)
        broker.terminate()
        await asyncio.to_thread(broker.start)
        found: list[bytes] = []
        async with asyncio.timeout(60):
            while len(found) < 6:  # the same subscription
                try:
                    for message in await subscription.fetch(10, timeout=1):
                        found.append(message.data)
                        await message.ack_sync()
                except (NatsTimeoutError, nats.errors.Error):
                    await asyncio.sleep(0.05)
        assert found == [b"%d" % at for at in range(4, 10)]
        assert (await context.publish(f"{name}.a", b"new")).seq == 11

    try:
        with_nats(server.url, work)
    finally:
        broker.kill()
        server.stop()


# ---- refusals ----


@pytest.mark.long
def test_streams_that_cannot_be_copied_are_refused_with_the_reason(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    async def fill(connection: Any) -> None:
        await created(connection, name)
        await created(connection, f"{name}-m", subjects=[], mirror={"name": name})
        await created(connection, f"{name}-r", republish={"src": ">", "dest": f"{name}.republished.>"})
        await published(connection, f"{name}-r.a", [b"1"])

    with_nats(source, fill)

    def refusal(stream: str, *options: str) -> str:
        done = migrated(source, broker, stream, "--no-follow", *options, check=False)
        assert done.returncode == 1
        return str(done.stderr)

    assert "has no stream 'missing'" in refusal("missing")
    assert "has mirror, which natslog does not support" in refusal(f"{name}-m")
    assert "--ignore republish" in refusal(f"{name}-r")
    assert "has no such field" in refusal(f"{name}-r", "--ignore", "republsh")
    assert "is no name of a stream" in refusal("a b")
    assert migrated(source, broker, f"{name}-r", "--no-follow", "--ignore", "republish")["messages"] == 1
    client.create_stream(f"{name}-other", f"{name}-other.>")
    with_nats(source, lambda one: created(one, f"{name}-other", subjects=[f"{name}-x"]))
    assert "it was not imported" in refusal(f"{name}-other")


@pytest.mark.long
def test_stream_that_was_created_again_is_another_one(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    async def fill(connection: Any) -> None:
        await created(connection, name)
        await published(connection, f"{name}.a", [b"1", b"2"])

    async def again(connection: Any) -> None:
        await api(connection, f"STREAM.DELETE.{name}")
        await fill(connection)
        await published(connection, f"{name}.a", [b"3", b"4"])

    with_nats(source, fill)
    migrated(source, broker, name, "--no-follow")
    with_nats(source, again)
    done = migrated(source, broker, name, "--no-follow", check=False)
    assert done.returncode == 1
    assert f"is no copy of jetstream:{name}:" in done.stderr
    assert sorted(rows(client, name)) == [1, 2]


@pytest.mark.long
def test_stream_that_is_deleted_during_the_copy_ends_it(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str, tmp_path: Path
) -> None:
    async def again(connection: Any) -> None:
        await api(connection, f"STREAM.DELETE.{name}")
        await created(connection, name)

    with_nats(source, lambda one: created(one, name))
    with running(source, broker, name, tmp_path / "import.log") as process:
        eventually(lambda: next_offset(client, name) == 0, what="the import has begun")
        eventually(lambda: "following" in (tmp_path / "import.log").read_text(), what="it follows")
        with_nats(source, again)
        assert process.wait(60) == 1
    assert "deleted and created again" in (tmp_path / "import.log").read_text()


def test_stream_that_is_created_again_before_the_import_has_its_consumer(
    source: str, client: NatslogClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Receiving.begin

    async def begin(self: Receiving) -> None:
        async def again(connection: Any) -> None:
            await api(connection, f"STREAM.DELETE.{name}")
            await created(connection, name)

        await asyncio.to_thread(with_nats, source, again)
        await original(self)

    with_nats(source, lambda one: created(one, name))
    monkeypatch.setattr(Receiving, "begin", begin)
    options = MigrationOptions(url=source, stream=name, name=name, until="resumed")
    with pytest.raises(MigrationFailed, match="was deleted and created again during the import"):
        asyncio.run(asyncio.wait_for(migrate(client, options), 30))


@pytest.mark.long
def test_server_without_jetstream_is_named(broker: BrokerProcess, tmp_path: Path) -> None:
    server = NatsServer(0, tmp_path / "nats.log", has_leafnodes=False).start()
    try:
        done = natslog("import", "--from-jetstream", server.url, "x", url=broker.url, check=False)
    finally:
        server.stop()
    assert done.returncode == 1
    assert "JetStream is not enabled there" in done.stderr


@pytest.mark.long
def test_message_that_natslog_cannot_store_is_named_and_can_be_left_out(
    source: str, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    async def fill(connection: Any) -> None:
        await created(connection, name)
        await published(connection, f"{name}.a", [b"1"])
        block = b"NATS/1.0\r\nBad: \xff\xfe\r\n\r\n"
        raw = f"HPUB {name}.b {len(block)} {len(block) + 1}\r\n".encode() + block + b"x\r\n"
        connection._transport.write(raw)
        await flushed(connection)
        await published(connection, f"{name}.a", [b"3"])

    with_nats(source, fill)
    refused = migrated(source, broker, name, "--no-follow", check=False)
    assert refused.returncode == 1
    assert "cannot store the message with sequence 2" in refused.stderr
    done = migrated(source, broker, name, "--no-follow", "--skip-unstorable")
    assert (done["skipped"], done["end_offset"]) == (1, 3)
    assert sorted(rows(client, name)) == [1, 3]


@pytest.mark.long
def test_options_that_exclude_each_other_are_refused(broker: BrokerProcess, source: str) -> None:
    for arguments in (
        ("--from-jetstream", source, "x", "--all"),
        ("--from-jetstream", source, "x", "--switch-over", "--no-follow"),
        ("x", "--switch-over"),
    ):
        done = natslog("import", *arguments, url=broker.url, check=False)
        assert done.returncode == 1, done.stdout
