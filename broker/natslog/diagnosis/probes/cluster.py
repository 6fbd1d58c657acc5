"""The brokers, as they answer from here: what each of them states, and what the cluster states about them."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime

import msgspec
import urllib3

from natslog.client import NatslogClient
from natslog.diagnosis.examined import BrokerFacts, ClusterFacts
from natslog.errors import NatslogError

ANSWER_WITHIN_S = 4.0
MOST_BROKERS = 50
_SCRAPES = re.compile(rb'^natslog_http_requests_total\{path="/metrics"\} ([0-9.e+]+)$', re.MULTILINE)
_LOST = re.compile(rb"^natslog_nats_connections_lost_total ([0-9.e+]+)$", re.MULTILINE)


class _Health(msgspec.Struct):
    version: str


class _Member(msgspec.Struct):
    id: int
    url: str | None = None
    alive: bool = False


class _Cluster(msgspec.Struct):
    brokers: list[_Member]


def hurried(client: NatslogClient) -> NatslogClient:
    """The same servers and credentials; a broker that does not answer costs little time."""
    return NatslogClient(client.servers, replace(client.options, timeout_s=ANSWER_WITHIN_S, retries=0))


def probe_cluster(client: NatslogClient, *, for_production: bool = False) -> ClusterFacts:
    """Args: for_production: streams and tokens are listed, too."""
    with hurried(client) as asker:
        facts = ClusterFacts(servers=list(asker.servers))
        try:
            facts.cluster = asker.cluster()
        except NatslogError as error:
            facts.problem = error.message
            return facts
        try:
            facts.findings = asker.overview()["findings"]
        except (NatslogError, KeyError) as error:
            facts.overview_problem = error.message if isinstance(error, NatslogError) else "it has no findings"
        try:
            facts.has_security = bool(asker.whoami()["security"])
        except (NatslogError, KeyError):
            facts.has_security = None
        try:
            members = msgspec.convert(facts.cluster, _Cluster).brokers
        except msgspec.ValidationError as error:
            facts.problem = f"the answer to GET /v1/cluster is not that of a broker: {error}"
            return facts
        if for_production:
            with suppress(NatslogError):
                facts.streams = asker.streams()
            if facts.has_security:
                with suppress(NatslogError):
                    facts.tokens = asker.tokens()
        facts.brokers = [_broker(asker, one.id, one.url) for one in members[:MOST_BROKERS] if one.url is not None]
        return facts


def subjects_of_streams(client: NatslogClient, most: int) -> list[str]:
    """Empty if no broker states them."""
    try:
        with hurried(client) as asker:
            streams = asker.streams()
    except NatslogError:
        return []
    return list(dict.fromkeys(subject for one in streams for subject in one.get("subjects", [])))[:most]


def _broker(asker: NatslogClient, number: int, url: str) -> BrokerFacts:
    facts = BrokerFacts(id=number, url=url)
    before_s = time.time()
    answer = asker.answer_of(url, "/healthz", ANSWER_WITHIN_S)
    after_s = time.time()
    if answer is None or answer.status != 200:
        facts.problem = "no answer" if answer is None else f"HTTP {answer.status}"
        return facts
    try:
        facts.version = msgspec.json.decode(answer.data, type=_Health).version
        facts.clock_apart_s = _apart_s(answer, before_s, after_s)
        seen = asker.answer_of(url, "/v1/cluster", ANSWER_WITHIN_S)
        if seen is not None and seen.status == 200:
            brokers = msgspec.json.decode(seen.data, type=_Cluster).brokers
            facts.alive = [one.id for one in brokers if one.alive]
        metrics = asker.answer_of(url, "/metrics", ANSWER_WITHIN_S)
        if metrics is not None and metrics.status == 200:
            facts.nats_connections_lost, facts.scrapes = _number(_LOST, metrics.data), _number(_SCRAPES, metrics.data)
    except (msgspec.DecodeError, ValueError) as error:
        facts.problem = f"its answer is not that of a broker: {error}"
    return facts


def _number(metric: re.Pattern[bytes], text: bytes) -> int | None:
    found = metric.search(text)
    return None if found is None else int(float(found[1]))


def _apart_s(answer: urllib3.BaseHTTPResponse, before_s: float, after_s: float) -> float:
    """How much the clock of the broker is ahead at least: its header `Date` is in whole seconds, and was written
    between both moments.
    """
    if (date := answer.headers.get("Date")) is None:
        return 0.0
    stated_s = parsedate_to_datetime(date).timestamp()
    if stated_s > after_s:
        return round(stated_s - after_s, 3)
    return round(min(0.0, stated_s + 1 - before_s), 3)
