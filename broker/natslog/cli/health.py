"""Whether a cluster is healthy, and a sentence for each problem."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from natslog.client import NatslogClient


def problems_of(client: NatslogClient, cluster: dict[str, Any], streams: list[dict[str, Any]]) -> list[str]:
    """Empty where every broker is up, connected to NATS and a voter, and every replica of every stream is in sync."""
    found = (
        []
        if cluster["is_current"]
        else ["the metadata is unavailable because no majority of the brokers is connected: start the missing brokers"]
    )
    for broker in cluster["brokers"]:
        found += _problems_of_broker(client, broker)
    found += [problem for stream in streams for problem in _problems_of_stream(stream)]
    return found


def summary(cluster: dict[str, Any], streams: list[dict[str, Any]]) -> str:
    """Of a cluster without problems."""
    brokers = len(cluster["brokers"])
    return (
        f"healthy: {brokers} of {brokers} brokers, {len(streams)} of {len(streams)} streams with a leader, "
        "all replicas in sync"
    )


def _problems_of_broker(client: NatslogClient, broker: dict[str, Any]) -> Iterator[str]:
    """A broker that the other brokers can reach is no problem of the cluster, even if this machine cannot reach it."""
    if not broker["alive"]:
        why = f": {broker['problem']['message']}" if "problem" in broker else ""
        yield f"broker {broker['id']} at {broker['url']} is down{why}"
        return
    if broker["role"] != "voter":
        yield f"broker {broker['id']} at {broker['url']} is not a voter yet (its role is {broker['role']})"
    ready = client.readiness(broker["url"]) if broker["url"] else None
    if ready is not None and ready.get("reason") is not None:
        yield f"broker {broker['id']} at {broker['url']} is not ready: {ready['reason']}"
    if ready is not None and not ready.get("has_disk_room", True):
        yield f"a disk of broker {broker['id']} at {broker['url']} is full: it accepts no messages"


def _problems_of_stream(stream: dict[str, Any]) -> Iterator[str]:
    name, in_sync, replicas = stream["name"], len(stream["isr"]), len(stream["replica_ids"])
    if "problem" in stream and stream.get("import_state") != "importing":  # which may follow the original for days
        yield f"stream {name}: {stream['problem']['message']}"
    elif stream["leader"] is None:
        yield f"stream {name} has no leader"
    if in_sync < stream["min_isr"]:
        yield f"stream {name} refuses writes: {in_sync} replicas are in sync, min_isr is {stream['min_isr']}"
    elif in_sync < replicas:
        yield f"stream {name} is under-replicated: {in_sync} of {replicas} replicas are in sync"
