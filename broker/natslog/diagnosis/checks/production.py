"""What a cluster lacks for production: `natslog doctor --production`. Each remedy has the command or the setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from natslog.config import is_loopback
from natslog.diagnosis.examined import ClusterFacts, Examined, FolderFacts
from natslog.diagnosis.outcomes import Outcome, not_checked, ok, warning
from natslog.times import parse_timestamp_us

_REPLICAS = 3
_MOST_NAMES = 5
_SOON_S = 14 * 86400
_LEAST_SCRAPES = 10
_ROOT_SHARE = 0.2  # of the file system that is free
_NOT_LISTED = "streams were not listed: give a token that may see all of them"
_LIMITS = ("max_age", "max_bytes", "max_messages", "max_messages_per_subject", "ttl")


def brokers(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    count = len(facts.cluster.get("brokers", []))
    found = f"{count} broker(s)"
    if not count:
        return
    if count < _REPLICAS:
        yield warning(
            f"{found}: the failure of one stops all changes, or loses what it alone has",
            "Start brokers on other machines until there are three: natslog server --seeds URL,URL,URL "
            "--cluster-secret-file FILE --broker-id N (docs/OPERATIONS.md, Three brokers).",
            brokers=count,
        )
    else:
        yield ok(found, brokers=count)


def replicas(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    if facts.streams is None:
        yield not_checked(_NOT_LISTED)
    streams = _streams(facts)
    few = [one["name"] for one in streams if one["replicas"] < _REPLICAS]
    alone = [one["name"] for one in streams if one["replicas"] >= _REPLICAS and one["min_isr"] < 2]
    if few:
        yield warning(
            f"{len(few)} of {len(streams)} streams have fewer than {_REPLICAS} replicas: {_shown(few)}",
            f"natslog stream edit {few[0]} --replicas {_REPLICAS} --min-isr 2; all at once: natslog apply.",
            streams=len(few),
        )
    if alone:
        yield warning(
            f"{len(alone)} streams ack what one replica has, if the others are not in sync: {_shown(alone)}",
            f"natslog stream edit {alone[0]} --min-isr 2.",
            streams=len(alone),
        )
    if streams and not few and not alone:
        yield ok(f"{len(streams)} streams have {_REPLICAS} replicas or more, 2 or more in sync")


def retention(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    if facts.streams is None:
        yield not_checked(_NOT_LISTED)
    streams = _streams(facts)
    unlimited = [one["name"] for one in streams if not any(one.get(limit) for limit in _LIMITS)]
    if unlimited:
        yield warning(
            f"{len(unlimited)} of {len(streams)} streams have no limit, and grow until the disk is full: "
            f"{_shown(unlimited)}",
            f"natslog stream edit {unlimited[0]} --max-age 30d, or --max-bytes; for all: the setting max_store_bytes.",
            streams=len(unlimited),
        )
    elif streams:
        yield ok(f"all {len(streams)} streams have limits")


def tls(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    plain = [one.url for one in facts.brokers if one.url.startswith("http://") and not _is_local(one.url)]
    if plain:
        yield warning(
            f"tokens and messages are not encrypted between clients and brokers: {_shown(plain)}",
            "natslog tls init creates certificates; set tls_cert_file, tls_key_file and tls_ca_file of the brokers.",
        )
    config = examined.config
    urls = [] if config is None else config.nats_url.split(",")
    open_urls = [url for url in urls if not url.strip().startswith(("tls:", "wss:")) and not _is_local(url)]
    if config is not None and open_urls and config.nats_tls_ca_file is None:
        yield warning(
            "messages are not encrypted between the broker and NATS",
            "Enable TLS in the NATS server, and set nats_url = tls://HOST:4222 and nats_tls_ca_file.",
        )
    elif facts.brokers and not plain:
        yield ok("brokers are reached by TLS, or from this machine only")


def tokens(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    if facts.has_security is False:
        yield warning(
            "everyone who reaches a broker may read and change all streams",
            "Set security = true, then: natslog token create NAME --role reader --expires 90d.",
        )
    if facts.tokens is None:
        if facts.has_security:
            yield not_checked("tokens were not listed", "Give a token of an administrator.")
        return
    endless = [one["identity"] for one in facts.tokens if not one.get("expires")]
    ending = [one["identity"] for one in facts.tokens if _ends_soon(one.get("expires"), examined.now_s)]
    if endless:
        yield warning(
            f"tokens of these identities never expire: {_shown(endless)}",
            f"natslog token create {endless[0]} --expires 90d, use it, then natslog token revoke the old one.",
        )
    if ending:
        yield warning(
            f"tokens of these identities expire within 14 days, or have expired: {_shown(ending)}",
            f"natslog token create {ending[0]} --expires 90d.",
        )
    if not endless and not ending:
        yield ok(f"{len(facts.tokens)} tokens expire, and none within 14 days")


def disk(facts: FolderFacts, examined: Examined) -> Iterator[Outcome]:
    free = facts.free_bytes / max(1, facts.total_bytes)
    if facts.mount_point == "/":
        yield warning(
            f"{facts.folder} is on the file system of the operating system, which other programs can fill",
            "Mount a disk of its own at the data folder, for example with XFS or ext4.",
        )
    if free < _ROOT_SHARE:
        yield warning(
            f"{free:.0%} of the disk is free", "Extend it, or limit streams: natslog stream edit NAME --max-bytes SIZE."
        )
    if facts.mount_point != "/" and free >= _ROOT_SHARE:
        yield ok(f"a file system of its own, {free:.0%} free")


def backups(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    """Exports only read, so that brokers have no record of them."""
    if facts.cluster:
        yield not_checked(
            "brokers have no record of exports: run natslog export --all FOLDER from a timer, which adds what is new, "
            "copy the folder to another machine, and try natslog import into another cluster"
        )


def alerts(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    unwatched = [one.id for one in facts.brokers if one.scrapes is not None and one.scrapes < _LEAST_SCRAPES]
    if unwatched:
        yield warning(
            f"/metrics was requested fewer than {_LEAST_SCRAPES} times from broker(s) {', '.join(map(str, unwatched))} "
            "since they were started",
            "Let Prometheus scrape them, with the rules of deploy/prometheus/alerts.yml (docs/OPERATIONS.md, Alerts).",
        )
    seen = [one for one in facts.brokers if one.scrapes is not None]
    if len(seen) < len(facts.cluster.get("brokers", [])):
        yield not_checked(f"the metrics of {len(seen)} brokers were read, which are not all")
    elif seen and not unwatched:
        yield ok("the metrics of all brokers are requested; whether alerts are sent is not known")


def _streams(facts: ClusterFacts) -> list[dict[str, Any]]:
    return [one for one in facts.streams or () if not str(one["name"]).startswith("__")]


def _shown(names: Sequence[object]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(map(str, names[:_MOST_NAMES])) + (f" and {more} more" if more > 0 else "")


def _is_local(url: str) -> bool:
    return is_loopback(urlsplit(url.strip() if "://" in url else f"nats://{url.strip()}").hostname or "")


def _ends_soon(expires: object, now_s: float) -> bool:
    return bool(expires) and parse_timestamp_us(str(expires)) / 1e6 < now_s + _SOON_S
