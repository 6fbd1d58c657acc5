"""The table of docs/GUARANTEES.md, row by row: which streams take messages while replicas are down, and which keep all.

Five brokers, of which 4 and 5 are killed: a majority of the brokers stays, so only the replicas count. Then a third one
is killed, and no majority is left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nats.errors
import pyarrow as pa
import pytest

from natslog.client import ClientOptions, NatslogClient
from natslog.client.appending import PartUploader
from natslog.errors import NatslogError
from tests.cluster_harness import Cluster, running_cluster
from tests.harness import all_values, eventually, with_nats

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

LOST = (4, 5)
GOES_ON_WITHIN_S = 30.0
STREAMS = {
    "of2min1": ((4, 1), 1, True),
    "of2min2": ((4, 1), 2, False),
    "of3min1": ((4, 5, 1), 1, True),
    "of3min2": ((4, 1, 2), 2, True),
    "of3min2loses2": ((4, 5, 1), 2, False),
    "of3min3": ((4, 1, 2), 3, False),
    "of5min3": ((4, 5, 1, 2, 3), 3, True),
    "of5min2": ((4, 5, 1, 2, 3), 2, True),
}
"""Name: the replicas, the preferred leader first, `min_isr`, and whether it takes messages without brokers 4 and 5."""


def published(cluster: Cluster, stream: str, value: bytes) -> dict[str, Any] | None:
    """The answer; None where there is none."""

    async def ask(connection: Any) -> dict[str, Any] | None:
        try:
            return dict(json.loads((await connection.request(stream, value, timeout=2)).data))
        except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
            return None

    return with_nats(cluster.nats_url, ask)


def takes(cluster: Cluster, stream: str, value: bytes) -> bool:
    answer = published(cluster, stream, value)
    return answer is not None and "error" not in answer


@contextmanager
def filled(folder: Path) -> Iterator[Cluster]:
    with running_cluster(folder, brokers=5) as cluster:
        with cluster.client() as client:
            for name, (replicas, min_isr, _) in STREAMS.items():
                client.create_stream(name, name, replicas=len(replicas), min_isr=min_isr)
                client.move_stream(name, replicas)
        for name, (replicas, _, _) in STREAMS.items():
            eventually(lambda name=name, replicas=replicas: is_on(cluster, name, replicas), 60, f"{name} is moved")
            eventually(lambda name=name: takes(cluster, name, b"before"), 30, f"{name} takes messages")
        cluster.wait_in_sync()
        yield cluster


def is_on(cluster: Cluster, name: str, replicas: tuple[int, ...]) -> bool:
    found = cluster.stream(name)
    return found is not None and set(found["replica_ids"]) == set(found["isr"]) == set(replicas)


def test_replicas_and_min_isr_decide_what_is_accepted_and_all_that_was_acked_is_kept(tmp_path: Path) -> None:
    with filled(tmp_path / "own") as cluster:
        for number in LOST:
            cluster.broker(number).kill()
        acked: dict[str, list[bytes]] = {}
        for name, (replicas, min_isr, goes_on) in STREAMS.items():
            if goes_on:
                eventually(lambda name=name: takes(cluster, name, b"meanwhile"), GOES_ON_WITHIN_S, f"{name} goes on")
            else:
                refused_for_too_few_replicas(cluster, name, len(set(replicas) - set(LOST)), min_isr)
            acked[name] = [b"before", b"meanwhile"] if goes_on else [b"before"]
        third_is_lost(cluster)
        for broker in cluster.brokers:
            if not broker.is_up:
                broker.kill()
                broker.spawn()
        cluster.wait_in_sync(120)
        with cluster.client() as client:
            for name, values in acked.items():
                stored = all_values(client, name)
                assert [value for value in values if value not in stored] == [], f"{name} has lost what was acked"
                assert b"refused" not in stored, f"{name} stores what was refused"


def refused_for_too_few_replicas(cluster: Cluster, name: str, left: int, min_isr: int) -> None:
    def is_short() -> bool:
        found = cluster.stream(name)
        return found is not None and found["leader"] not in (None, *LOST) and len(found["isr"]) == left

    eventually(is_short, GOES_ON_WITHIN_S, f"{name} has a leader and {left} in-sync replicas")
    answer = eventually(lambda: published(cluster, name, b"refused"), 30, f"{name} answers")
    assert answer is not None
    assert f"{left} replicas in sync but requires {min_isr}" in answer["error"]["description"]
    leader = cluster.leader_of(name)
    assert leader is not None
    with NatslogClient(leader.url, ClientOptions(retries=0)) as client:
        with pytest.raises(NatslogError, match=f"requires {min_isr}") as refused:
            append(client, name)
        assert refused.value.retriable


def append(client: NatslogClient, name: str) -> None:
    uploader = PartUploader(client, name, "loader", 0)
    uploader.add(pa.record_batch({"value": pa.array([b"refused"], pa.binary())}))
    client.commit_append(name, "loader", 0, uploader.finish())


def third_is_lost(cluster: Cluster) -> None:
    """Neither data nor metadata are written without a majority; what is committed is served."""
    name, left = "of5min2", cluster.broker(1)
    eventually(lambda: (left.high_watermark(name) or 0) >= 2, 30, "it is known to be committed")
    cluster.broker(3).kill()

    def refusal(method: str, path: str, body: Any = None) -> tuple[int, str, bool] | None:
        answer = left.ask(method, path, body, timeout_s=15)
        if answer is None or answer.status < 400:
            return None
        error = json.loads(answer.data)["error"]
        return answer.status, error["code"], error["retriable"]

    for request in (
        ("POST", "/v1/streams", {"name": "new", "subject": "new"}),
        ("PUT", f"/v1/cursors/reader/{name}", {"offset": 1}),
    ):
        found = eventually(lambda request=request: refusal(*request), 30, f"{request} is refused")
        assert found == (503, "metadata_unavailable", True)
    assert eventually(lambda: refusal("GET", f"/v1/streams/{name}/messages?start=0&end=latest"), 30, "no position")
    assert published(cluster, name, b"refused") is None
    committed = left.ask("GET", f"/v1/streams/{name}/messages?start=0&end=2")
    assert committed is not None
    assert committed.status == 200
    shown = left.json("/v1/streams")
    assert {one["name"] for one in shown} == set(STREAMS)
    assert all("high_watermark" not in one for one in shown)
