"""Consumers of a JetStream stream that was imported, at the leader of the natslog stream.

Theory of operation. JetStream states of a consumer its configuration and its ack floor, up to which everything is
acked. Its record here has the same configuration, so that a client that creates it again finds an equal one, and its
state begins at the ack floor: messages behind it are delivered, also those that were delivered, or acked out of order,
before. JetStream does not state which ones these are.

Invariant. While a stream is not resumed, its consumers are not served, so they are replaced as often as needed.

Source: nats-server, `ConsumerInfo` in `server/consumer.go`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from natslog.jetstream.consumers import config as configs
from natslog.jetstream.consumers.config import ConsumerConfig
from natslog.jetstream.consumers.state import ConsumerRecord, StateRecord
from natslog.jetstream.errors import ApiError, consumer_error
from natslog.jetstream.requests import decoded
from natslog.jetstream.stream_config import StreamConfig, config_of
from natslog.node.replicas import consumer_records
from natslog.node.replicas.companion_records import Record
from natslog.node.replicas.consumer_records import ConsumerOrigin
from natslog.node.replicas.stream import HostedStream

_RECORDS_AT_ONCE = 200


async def import_consumers(stream: HostedStream, origins: Sequence[ConsumerOrigin]) -> list[tuple[str, str]]:
    """The consumers of a stream that is led here and not resumed become these. Returns which ones were refused, and
    why.

    Raises:
        As `Companion.append`: some may have been stored then. Repeat the request.
    """
    stream_config, refused = config_of(stream.record), list[tuple[str, str]]()
    found: dict[str, list[Record]] = {}
    accepted: dict[str, ConsumerConfig] = {}
    for origin in origins:
        name = str(origin.config.get("durable_name") or origin.config.get("name") or "")
        try:
            config = _checked(origin, stream_config, accepted)
        except ApiError as error:
            refused.append((name, error.description))
        else:
            accepted[name], found[name] = config, _records(name, origin, config)
    records = [consumer_records.deleted(name, one.id) for name, one in stream.consumers.consumers.items()]
    records += [record for of_one in found.values() for record in of_one]
    for first in range(0, len(records), _RECORDS_AT_ONCE):
        await stream.companion.append(records[first : first + _RECORDS_AT_ONCE])
    return refused


def _checked(origin: ConsumerOrigin, stream: StreamConfig, others: dict[str, ConsumerConfig]) -> ConsumerConfig:
    """The configuration as it is stored. Raises ApiError: natslog does not support it."""
    config = configs.stored(decoded(msgspec.json.encode(origin.config), ConsumerConfig))
    if not config.durable_name:
        raise consumer_error("durable_name_not_set")
    config = msgspec.structs.replace(
        config, name=config.durable_name, num_replicas=min(config.num_replicas, stream.num_replicas)
    )
    config = configs.with_defaults(config, stream, is_pedantic=False)
    configs.check(config, stream)
    if stream.retention == "workqueue":
        configs.require_work_queue(config, config.durable_name, others, is_new=True)
    return config


def _records(name: str, origin: ConsumerOrigin, config: ConsumerConfig) -> list[Record]:
    next_seq, consumer_id = origin.ack_floor[1] + 1, secrets.token_hex(8)
    record = ConsumerRecord(created_us=origin.created_us, config=config, start=next_seq, resume=next_seq)
    state = StateRecord(
        next_seq=next_seq,
        delivered=origin.ack_floor,
        floor=origin.ack_floor,
        resume=next_seq,
        skip=b"",
        pending=b"",
        exceeded={},
        delivered_age_us=-1,
        acked_age_us=-1,
    )
    return [
        consumer_records.consumer(name, consumer_id, record.to_bytes()),
        consumer_records.state(name, consumer_id, state.to_bytes()),
    ]
