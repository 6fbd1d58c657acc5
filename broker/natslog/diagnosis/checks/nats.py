"""NATS: login, versions, limits, permissions, the JetStream API, the leafnode connection."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from natslog.diagnosis.examined import ClusterFacts, Examined, NatsFacts
from natslog.diagnosis.outcomes import Outcome, ok, problem, warning
from natslog.wire.probing import ServerFacts

_OLDEST_TESTED = (2, 14)
_LEAST_PAYLOAD_BYTES = 256 * 1024
_SLOW_MS = 50.0
_DAY_S = 24 * 3600.0
_EXPIRES_SOON_S = 14 * _DAY_S


def _up(facts: NatsFacts) -> list[ServerFacts]:
    return [one for one in facts.servers if not one.problem]


def login(facts: NatsFacts, examined: Examined) -> Iterator[Outcome]:
    some_are_up = bool(_up(facts))
    for one in facts.servers:
        if not one.problem:
            yield ok(f"{one.url}: connected and logged in", url=one.url)
        elif some_are_up and not one.is_login_refused:
            yield warning(
                f"{one.url} does not answer, another server does: {one.problem}",
                "Start this server, or remove it from nats_url.",
                url=one.url,
            )
        else:
            yield problem(
                one.problem,
                "Correct what the message names. See Login to NATS in docs/OPERATIONS.md, and docs/SETTINGS.md.",
                url=one.url,
            )


def version(facts: NatsFacts, examined: Examined) -> Iterator[Outcome]:
    for one in _up(facts):
        if _number(one.version) < _OLDEST_TESTED:
            yield warning(
                f"{one.url} is nats-server {one.version or 'of an unknown version'}",
                "Upgrade it: natslog is tested with nats-server 2.14 and later.",
                version=one.version,
            )
        else:
            yield ok(f"nats-server {one.version}", version=one.version)


def _number(version: str) -> tuple[int, ...]:
    parts = version.split("-")[0].split(".")
    return tuple(int(part) for part in parts[:2]) if all(part.isdecimal() for part in parts[:2]) else ()


def round_trip(facts: NatsFacts, examined: Examined) -> Iterator[Outcome]:
    for one in _up(facts):
        if not one.round_trips_ms:
            continue
        median_ms, most_ms = statistics.median(one.round_trips_ms), max(one.round_trips_ms)
        found = f"{one.url}: {median_ms:.1f} ms, at most {most_ms:.1f} ms, of {len(one.round_trips_ms)} round trips"
        if median_ms > _SLOW_MS:
            yield warning(
                found,
                "Run the broker near its NATS server: each ack takes at least one round trip.",
                median_ms=median_ms,
                most_ms=most_ms,
            )
        else:
            yield ok(found, median_ms=median_ms, most_ms=most_ms)


def max_payload(facts: NatsFacts, examined: Examined) -> Iterator[Outcome]:
    for one in _up(facts):
        found = f"{one.url}: max_payload is {one.max_payload_bytes:,} bytes"
        if one.max_payload_bytes < _LEAST_PAYLOAD_BYTES:
            yield warning(
                found,
                "Increase max_payload in the configuration of the NATS server (its default is 1MB): larger messages, "
                "envelopes and answers of the JetStream API are refused by it.",
                bytes=one.max_payload_bytes,
            )
        else:
            yield ok(found, bytes=one.max_payload_bytes)


def permissions(facts: NatsFacts, examined: Examined) -> Iterator[Outcome]:
    for one in _up(facts):
        if one.refused:
            yield problem(
                f"{one.url} does not permit this user to {', to '.join(one.refused)}",
                "Grant these permissions to the NATS user of the broker (Permissions of NATS users in "
                'docs/OPERATIONS.md). Those of $JS and _INBOX.natslog are not needed with jetstream = "off".',
                refused=one.refused,
            )
        else:
            yield ok(f"{one.url}: everything that was tried is permitted")


def jetstream(facts: NatsFacts, examined: Examined) -> Iterator[Outcome]:
    if examined.config is not None and examined.config.jetstream == "off":
        yield ok("the JetStream API is off by the settings")
        return
    own = _own_cluster(examined)
    for one in _up(facts)[:1]:  # the servers of a NATS cluster have the same accounts
        others = [cluster for cluster in one.api_clusters if cluster != own]
        if others:
            yield warning(
                "another natslog cluster serves the JetStream API in this NATS account",
                'Use another NATS account, or set jetstream = "off" in one of the clusters.',
                clusters=one.api_clusters,
            )
        elif one.api_server:
            yield warning(
                "the NATS server has JetStream enabled for this account, so natslog serves only the domain natslog",
                'Disable JetStream in the account to use natslog in its place, or set jetstream = "off". A subject '
                "that both record is acked by both.",
            )
        else:
            yield ok("no other program serves the JetStream API in this account")


def _own_cluster(examined: Examined) -> str | None:
    if isinstance(examined.cluster, ClusterFacts) and examined.cluster.cluster:
        return str(examined.cluster.cluster.get("cluster_id"))
    return getattr(examined.folder, "cluster_id", None) or None


def certificate(facts: NatsFacts, examined: Examined) -> Iterator[Outcome]:
    for one in _up(facts):
        if one.certificate_expires_s is None:
            continue
        days = (one.certificate_expires_s - examined.now_s) / _DAY_S
        found = f"{one.url}: the certificate of the server expires in {days:.0f} days"
        if days * _DAY_S < _EXPIRES_SOON_S:
            yield warning(found, "Renew the certificate of the NATS server.", days=round(days, 1))
        else:
            yield ok(found, days=round(days, 1))


def leafnode(facts: NatsFacts, examined: Examined) -> Iterator[Outcome]:
    for one in facts.leaves:
        if one.problem:
            yield problem(
                f"no leafnode listener at {one.url}: {one.problem}",
                "Start the NATS server with a leafnodes block (leafnodes { port: 7422 }), or correct nats_leaf_url.",
            )
        elif one.is_leaf_port is False:
            yield problem(
                f"{one.url} is a port for clients or for servers, not one for leafnodes",
                "Use the port of the leafnodes block of the NATS server in nats_leaf_url.",
            )
        else:
            yield ok(f"{one.url}: a listener for leafnodes answers; the login is not tried")
    if examined.config is not None and not facts.leaves:
        yield ok("nats_leaf_url is not set: there are no JetStream consumers")


def slow_consumer(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    stated = [one for one in facts.brokers if one.nats_connections_lost is not None]
    lost = {one.id: one.nats_connections_lost for one in stated if one.nats_connections_lost}
    for broker, count in lost.items():
        yield warning(
            f"broker {broker} has lost {count} connections to NATS since it started",
            "Its log states why. If the server closes them because the broker is a slow consumer, messages without "
            "acks are lost: look for a slow disk or an overloaded machine, or increase write_deadline of the server.",
            broker=broker,
            lost=count,
        )
    if stated and not lost:
        yield ok("no broker has lost a connection to NATS since it started")
