"""The JetStream API of three brokers: each request gets one answer, also after its leader was killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import nats.errors
import pytest

from tests.cluster_harness import Cluster, ClusterOptions
from tests.harness import eventually, with_nats

ANSWERS_WITHIN_S = 2.0
ANOTHER_WITHIN_S = 0.25
RESUMES_WITHIN_S = 30.0
_NO_LEADER = nats.errors.TimeoutError, nats.errors.NoRespondersError


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("jetstream") / "own", ClusterOptions(has_leafnodes=True))
    for broker in cluster.brokers:
        broker.settings["tags"] = "odd,all" if broker.number % 2 else "all"
    try:
        cluster.start()
        eventually(lambda: len(answers(cluster, "INFO")) == 1, RESUMES_WITHIN_S, "one broker answers")
        yield cluster
    finally:
        cluster.close()


def received(cluster: Cluster, call: str, body: Any = None) -> list[dict[str, Any]]:
    """All that come, until none has come for a while."""

    async def work(connection: Any) -> list[dict[str, Any]]:
        inbox = connection.new_inbox()
        subscription = await connection.subscribe(inbox)
        payload = b"" if body is None else json.dumps(body).encode()
        await connection.publish(f"$JS.API.{call}", payload, reply=inbox)
        found: list[dict[str, Any]] = []
        try:
            while True:
                async with asyncio.timeout(ANOTHER_WITHIN_S if found else ANSWERS_WITHIN_S):
                    message = await subscription.next_msg(timeout=30)
                    is_direct = "Nats-Sequence" in (message.headers or {})
                    found.append({"seq": int(message.headers["Nats-Sequence"])} if is_direct else _json(message))
        except TimeoutError:
            return found

    return with_nats(cluster.nats.url, work)


def answers(cluster: Cluster, call: str, body: Any = None) -> list[dict[str, Any]]:
    """Without the NATS server's own, that there are no responders."""
    return [one for one in received(cluster, call, body) if one]


def _json(message: Any) -> dict[str, Any]:
    return dict(json.loads(message.data)) if message.data else {}


def answer(cluster: Cluster, call: str, body: Any = None) -> dict[str, Any]:
    """Asks again while nothing subscribes to the call, as clients do: while the stream changes its leader."""

    def those_of_brokers() -> list[dict[str, Any]]:
        found = received(cluster, call, body)
        assert found, f"{call} was received, and not answered"
        return [one for one in found if one]

    (one,) = eventually(those_of_brokers, what=f"a broker answers {call}")
    return one


def create(cluster: Cluster, name: str, **config: Any) -> dict[str, Any]:
    return answer(cluster, f"STREAM.CREATE.{name}", {"name": name, "num_replicas": 3} | config)


def published(cluster: Cluster, subject: str, count: int) -> list[int]:
    """Sequences of messages that are sent again until they are acked."""

    async def work(connection: Any) -> list[int]:
        found = []
        for _ in range(count):
            async with asyncio.timeout(RESUMES_WITHIN_S):
                while True:
                    try:
                        found.append(json.loads((await connection.request(subject, b"x", timeout=1)).data)["seq"])
                        break
                    except (nats.errors.TimeoutError, nats.errors.NoRespondersError):  # no leader, or its ack was lost
                        await asyncio.sleep(0.1)
        return found

    return with_nats(cluster.nats.url, work)


@pytest.mark.long
def test_each_request_gets_one_answer(cluster: Cluster) -> None:
    names = [f"one{at}" for at in range(4)]  # led by several brokers
    for name in names:
        assert create(cluster, name, allow_direct=True)["did_create"]
    published(cluster, "one0", 3)
    assert answer(cluster, "STREAM.NAMES")["streams"] == names
    assert [one["config"]["name"] for one in answer(cluster, "STREAM.LIST")["streams"]] == names
    for name in names:
        info = answer(cluster, f"STREAM.INFO.{name}")
        assert info["config"]["num_replicas"] == 3
        assert len(info["cluster"]["replicas"]) == 2
        assert all(one["current"] for one in info["cluster"]["replicas"])
    assert {answer(cluster, f"STREAM.INFO.{name}")["cluster"]["leader"] for name in names} > {"natslog-1"}
    assert answer(cluster, "STREAM.MSG.GET.one0", {"seq": 3})["message"]["seq"] == 3
    assert answer(cluster, "DIRECT.GET.one0", {"seq": 2}) == {"seq": 2}
    assert answer(cluster, "STREAM.INFO.none")["error"]["err_code"] == 10059
    assert answer(cluster, "CONSUMER.INFO.one1.none")["error"]["err_code"] == 10014
    for name in names:
        assert answer(cluster, f"STREAM.UPDATE.{name}", {"name": name, "num_replicas": 3, "description": "x"})["config"]
        assert answer(cluster, f"STREAM.PURGE.{name}")["success"]
        assert answer(cluster, f"STREAM.DELETE.{name}")["success"]
    assert answer(cluster, "STREAM.NAMES")["streams"] is None


@pytest.mark.long
def test_more_replicas_than_brokers(cluster: Cluster) -> None:
    assert create(cluster, "many", num_replicas=4)["error"]["err_code"] == 10074


def replicas_of(cluster: Cluster, name: str) -> set[str]:
    shown = answer(cluster, f"STREAM.INFO.{name}")["cluster"]
    return {shown["leader"], *(one["name"] for one in shown.get("replicas", []))}


@pytest.mark.long
def test_placement_tags(cluster: Cluster) -> None:
    odd = {"placement": {"tags": ["odd"]}}
    assert create(cluster, "tagged", **odd)["error"]["err_code"] == 10005
    assert create(cluster, "tagged", num_replicas=2, **odd)["config"]["placement"] == {"tags": ["odd"]}
    assert replicas_of(cluster, "tagged") == {"natslog-1", "natslog-3"}
    more = answer(cluster, "STREAM.UPDATE.tagged", {"name": "tagged", "num_replicas": 3, **odd})
    assert more["error"]["err_code"] == 10005
    assert answer(cluster, "STREAM.UPDATE.tagged", {"name": "tagged", "num_replicas": 3})["config"]
    cluster.wait_in_sync()
    assert answer(cluster, "STREAM.UPDATE.tagged", {"name": "tagged", "num_replicas": 2, **odd})["config"]
    eventually(lambda: replicas_of(cluster, "tagged") == {"natslog-1", "natslog-3"}, RESUMES_WITHIN_S)
    with cluster.client() as client:
        created = client.create_stream("own", "own", placement_tags=["odd"])
    assert created["placement_tags"] == ["odd"]
    assert replicas_of(cluster, "own") <= {"natslog-1", "natslog-3"}
    for name in ("tagged", "own"):
        answer(cluster, f"STREAM.DELETE.{name}")


def test_create_at_the_same_time_makes_one_stream(cluster: Cluster) -> None:
    async def work(connection: Any) -> list[dict[str, Any]]:
        bodies = [{"name": "race", "subjects": [f"race.{at % 2}"], "num_replicas": 3} for at in range(8)]
        asked = [
            connection.request("$JS.API.STREAM.CREATE.race", json.dumps(body).encode(), timeout=30) for body in bodies
        ]
        return [json.loads(one.data) for one in await asyncio.gather(*asked)]

    found = with_nats(cluster.nats.url, work)
    created = [one["config"]["subjects"] for one in found if "config" in one]
    assert created in ([["race.0"]] * 4, [["race.1"]] * 4)
    assert {one["error"]["err_code"] for one in found if "error" in one} == {10058}
    answer(cluster, "STREAM.DELETE.race")


@pytest.mark.long
@pytest.mark.parametrize("what", ["stream", pytest.param("metadata", marks=pytest.mark.long)])
def test_killed_leader_is_replaced_and_each_request_gets_one_answer_again(cluster: Cluster, what: str) -> None:
    name = f"kill-{what}"
    create(cluster, name, allow_direct=True)
    acked = published(cluster, name, 20)
    victim = cluster.leader_of(name) if what == "stream" else cluster.metadata_leader()
    assert victim is not None
    victim.kill()
    try:
        acked += published(cluster, name, 5)
        eventually(lambda: len(answers(cluster, "STREAM.NAMES")) == 1, RESUMES_WITHIN_S, "streams are listed again")
        state = eventually(lambda: answers(cluster, f"STREAM.INFO.{name}"), RESUMES_WITHIN_S, "the stream is shown")
        assert len(state) == 1
        assert state[0]["state"]["last_seq"] >= max(acked)
        assert state[0]["cluster"]["leader"] != f"natslog-{victim.number}" or what == "metadata"
        assert answer(cluster, f"STREAM.MSG.GET.{name}", {"seq": acked[0]})["message"]["seq"] == acked[0]
        assert answer(cluster, f"DIRECT.GET.{name}", {"seq": acked[-1]}) == {"seq": acked[-1]}
        assert answer(cluster, "STREAM.INFO.none")["error"]["err_code"] == 10059
    finally:
        victim.start()
        cluster.wait_in_sync()


class Bucket:
    """Puts of ascending numbers to one key, and gets beside them, until `is_over`. `acked`: the last number that was;
    `answered`: how many gets were, with a number that was acked before they were sent, or a later one.
    """

    def __init__(self) -> None:
        self.acked = self.answered = 0
        self.is_over = False

    async def use(self, connection: Any) -> None:
        await asyncio.gather(self._put(connection), *(self._get(connection, at % 2 == 0) for at in range(20)))

    async def _put(self, connection: Any) -> None:
        while not self.is_over:
            with suppress(*_NO_LEADER):
                message = await connection.request("bucket.k", b"%d" % (self.acked + 1), timeout=1)
                self.acked += "error" not in json.loads(message.data)

    async def _get(self, connection: Any, by_subject: bool) -> None:
        call, body = ("bucket.bucket.k", b"") if by_subject else ("bucket", b'{"last_by_subj":"bucket.k"}')
        while not self.is_over:
            least = self.acked
            with suppress(*_NO_LEADER):
                message = await connection.request(f"$JS.API.DIRECT.GET.{call}", body, timeout=1)
                status = (message.headers or {}).get("Status")
                assert status in (None, "503") or not least, f"the key exists, but the answer is {status}"
                if status is None:
                    assert int(message.data) >= least
                    self.answered += 1


@pytest.mark.long
def test_direct_requests_get_no_older_value_than_was_acked_while_leaders_are_killed(cluster: Cluster) -> None:
    assert create(cluster, "bucket", subjects=["bucket.*"], allow_direct=True, max_msgs_per_subject=1)["did_create"]
    cluster.wait_in_sync()
    bucket = Bucket()
    with ThreadPoolExecutor(1) as executor:  # brokers are started by this thread, with which they end
        using = executor.submit(with_nats, cluster.nats.url, bucket.use)
        try:
            for _ in range(2):
                for is_killed in (False, True):
                    before = bucket.answered
                    victim = cluster.leader_of("bucket") if is_killed else None
                    if victim is not None:
                        victim.kill()
                    eventually(lambda: bucket.answered > before + 500 or using.done(), RESUMES_WITHIN_S)  # noqa: B023
                    if victim is not None:
                        victim.start()
                        cluster.wait_in_sync()
        finally:
            bucket.is_over = True
        using.result()
    assert bucket.acked > 50
    answer(cluster, "STREAM.DELETE.bucket")


def test_replicated_stream_with_a_first_sequence(cluster: Cluster) -> None:
    made = create(cluster, "later", first_seq=1000)
    assert made["state"]["first_seq"] == 1000
    assert published(cluster, "later", 2) == [1000, 1001]
    assert answer(cluster, "STREAM.INFO.later")["state"]["last_seq"] == 1001
    answer(cluster, "STREAM.DELETE.later")


@pytest.mark.long
def test_stream_that_cannot_commit_does_not_hold_the_others(cluster: Cluster) -> None:
    """It is answered with an error, and others at once."""
    create(cluster, "fine", num_replicas=1)
    metadata_leader = cluster.metadata_leader()
    assert metadata_leader is not None
    spared = {answer(cluster, "STREAM.INFO.fine")["cluster"]["leader"], f"natslog-{metadata_leader.number}"}
    for at in range(12):  # until the follower is a broker whose death stops nothing else
        stuck_name = f"stuck{at}"
        create(cluster, stuck_name, num_replicas=2)
        (replica,) = answer(cluster, f"STREAM.INFO.{stuck_name}")["cluster"]["replicas"]
        if replica["name"] not in spared:
            break
    else:
        pytest.fail("no stream has its follower on a broker without another role")
    follower = cluster.broker(int(replica["name"].rpartition("-")[2]))
    follower.kill()
    try:

        async def work(connection: Any) -> tuple[bool, dict[str, Any]]:
            await connection.publish(stuck_name, b"x")
            stuck = [
                asyncio.ensure_future(connection.request(f"$JS.API.STREAM.INFO.{stuck_name}", b"", timeout=30))
                for _ in range(100)
            ]
            await asyncio.sleep(0.1)
            await connection.request("$JS.API.STREAM.INFO.fine", b"", timeout=30)
            is_first = not any(one.done() for one in stuck)
            first = await stuck[0]
            for one in stuck[1:]:
                one.cancel()
            return is_first, json.loads(first.data)

        is_first, found = with_nats(cluster.nats.url, work)
        assert is_first
        assert found["error"]["err_code"] == 10008
    finally:
        follower.start()
        cluster.wait_in_sync()
        for name in ("fine", "stuck"):
            answer(cluster, f"STREAM.DELETE.{name}")
