"""Advisories about streams: JSON on `$JS.EVENT.ADVISORY.STREAM.>`, while the API is served.

A change is stated by the broker that was asked for it, by whichever way: over this API, by HTTP or on the command line.
That another broker leads a stream is stated by the new leader. Advisories are published as far as the NATS server
accepts them now: one that is lost is not sent again.

Source: nats-server, `server/jetstream_events.go`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from natslog.jetstream.peers import broker_name, peers
from natslog.jetstream.stream_config import is_shown
from natslog.jetstream.stream_state import time_of
from natslog.node.broker import Broker
from natslog.node.clock import now_us
from natslog.node.replicas.jetstream import StreamChange
from natslog.node.replicas.stream import HostedStream

_PREFIX = "$JS.EVENT."
_TYPES = "io.nats.jetstream."
_ACTIONS = {"created": "create", "updated": "modify", "deleted": "delete"}


def event_frame(subject: str, kind: str, fields: Mapping[str, Any]) -> bytes:
    """A `PUB` frame. Args: subject: behind `$JS.EVENT.`. kind: of the event, behind `io.nats.jetstream.`."""
    body = {"type": f"{_TYPES}{kind}", "id": secrets.token_hex(11), "timestamp": time_of(now_us())} | dict(fields)
    payload = msgspec.json.encode(body)
    return b"PUB %b %d\r\n%b\r\n" % (f"{_PREFIX}{subject}".encode(), len(payload), payload)


class StreamAdvisories:
    """Of one broker, from now on."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._epochs: WeakKeyDictionary[HostedStream, int] = WeakKeyDictionary()  # that were stated

    def changed(self, change: StreamChange, name: str) -> None:
        fields = {"stream": name, "action": _ACTIONS[change]}
        self._publish(f"ADVISORY.STREAM.{change.upper()}", "advisory.v1.stream_action", name, fields)

    def began_to_lead(self, stream: HostedStream) -> None:
        """Or it still leads the stream, and its subjects were edited."""
        epoch, record = stream.leader_epoch, stream.record
        if len(record.replicas) > 1 and self._epochs.get(stream) != epoch:
            self._epochs[stream] = epoch
            kind, leader = "advisory.v1.stream_leader_elected", broker_name(self._broker.cluster.me)
            fields = {"stream": stream.name, "leader": leader, "replicas": peers(record, record.replicas)}
            self._publish("ADVISORY.STREAM.LEADER_ELECTED", kind, stream.name, fields)

    def _publish(self, subject: str, kind: str, name: str, fields: Mapping[str, Any]) -> None:
        if self._broker.jetstream in ("on", "domain") and is_shown(name):
            self._broker.link.lane(name).send_now(event_frame(f"{subject}.{name}", kind, fields))
