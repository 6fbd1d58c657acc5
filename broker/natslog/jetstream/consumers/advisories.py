"""Advisories and metrics about consumers: JSON on `$JS.EVENT.ADVISORY.>` and `$JS.EVENT.METRIC.>`.

They are published as far as the NATS server accepts them now: an advisory that is lost is not sent again.

Source: nats-server, `server/jetstream_events.go`.
"""

from __future__ import annotations

import secrets
from typing import Any

from natslog.jetstream.advisories import event_frame
from natslog.jetstream.consumers.config import ConsumerConfig
from natslog.jetstream.consumers.machine import Consumer
from natslog.jetstream.consumers.pending import TIME_US
from natslog.node.replicas.stream import HostedStream

_KINDS = {
    "ack": ("METRIC.CONSUMER.ACK", "metric.v1.consumer_ack"),
    "nak": ("ADVISORY.CONSUMER.MSG_NAKED", "advisory.v1.nak"),
    "term": ("ADVISORY.CONSUMER.MSG_TERMINATED", "advisory.v1.terminated"),
    "max_deliver": ("ADVISORY.CONSUMER.MAX_DELIVERIES", "advisory.v1.max_deliver"),
    "created": ("ADVISORY.CONSUMER.CREATED", "advisory.v1.consumer_action"),
    "deleted": ("ADVISORY.CONSUMER.DELETED", "advisory.v1.consumer_action"),
}


class Advisories:
    """Of the consumers of one stream."""

    def __init__(self, stream: HostedStream) -> None:
        self._stream = stream

    def publish(
        self, kind: str, consumer: str, config: ConsumerConfig, machine: Consumer, facts: dict[str, Any]
    ) -> None:
        """Args: facts: `seq`, `delivered_as`, `times` (how often it was delivered), `reason`, as far as there are."""
        if kind == "ack" and not _is_sampled(config.sample_freq):
            return
        where, what = _KINDS[kind]
        body: dict[str, Any] = {"stream": self._stream.name, "consumer": consumer}
        for name, field in (("delivered_as", "consumer_seq"), ("seq", "stream_seq"), ("times", "deliveries")):
            if name in facts:
                body[field] = facts[name]
        if facts.get("reason"):
            body["reason"] = facts["reason"]
        if kind in ("created", "deleted"):
            body["action"] = kind.removesuffix("d")
        if kind == "ack":
            body["ack_time"] = _age_ns(machine, facts)
        self._stream.nats.send_now(event_frame(f"{where}.{self._stream.name}.{consumer}", what, body))


def _is_sampled(frequency: str) -> bool:
    percent = int(frequency.removesuffix("%") or 0)
    return percent > 0 and secrets.randbelow(100) < percent


def _age_ns(machine: Consumer, facts: dict[str, Any]) -> int:
    """How long after its delivery the message was acked."""
    at = machine.pending.position_of(facts["seq"])
    if at is None:
        return 0
    age_us: int = facts["now_us"] - int(machine.pending.at(TIME_US, at)[0])
    return max(0, age_us) * 1000
