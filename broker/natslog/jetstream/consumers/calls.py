"""Calls of the API that concern consumers, at the leader of their stream.

Source: nats-server, `jsConsumerCreateRequest` and `addConsumerWithAction`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from natslog.jetstream.consumers import config as configs
from natslog.jetstream.consumers.config import ConsumerConfig, ConsumerCreateRequest, ConsumerPauseRequest
from natslog.jetstream.consumers.leading import LedConsumers
from natslog.jetstream.consumers.reading import start_of
from natslog.jetstream.consumers.served import ServedConsumer
from natslog.jetstream.consumers.serving import ConsumerServing
from natslog.jetstream.consumers.state import ConsumerRecord, packed
from natslog.jetstream.errors import api_error, consumer_error
from natslog.jetstream.requests import PagedRequest, decoded, has_fields, is_empty
from natslog.jetstream.stream_config import StreamConfig, config_of
from natslog.jetstream.stream_state import NO_TIME, time_of
from natslog.model import StreamRecord
from natslog.node.clock import now_us
from natslog.node.replicas import consumer_records
from natslog.node.replicas.stream import HostedStream
from natslog.times import parse_timestamp_us

NAMES_LIMIT = 1024
LIST_LIMIT = 256
_NAME_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NAME_CHARS = 8
_MOST_CONSUMERS = 100_000


class ConsumerCalls:
    """Each call returns the fields of its answer, or raises ApiError or NatslogError. `stream`: None if there is none.

    Args:
        dynamic: metadata of a configuration that is only in answers. cluster_of: who leads a stream and who follows;
            None if there is one broker.
    """

    def __init__(
        self,
        serving: ConsumerServing,
        dynamic: dict[str, str],
        cluster_of: Callable[[StreamRecord], dict[str, Any] | None],
    ) -> None:
        self.serving, self._dynamic, self._cluster_of = serving, dynamic, cluster_of

    async def _led(self, stream: HostedStream | None) -> LedConsumers:
        if stream is None:
            raise api_error("stream_not_found")
        led = await self.serving.begun(stream)
        if led is None:
            raise api_error("no_leaf_link")
        return led

    # ---- create ----

    async def create(
        self, stream: HostedStream | None, names: list[str], payload: bytes, *, is_durable: bool = False
    ) -> dict[str, Any]:
        """Args: names: of the stream, and as far as they are in the subject, of the consumer, and its filter."""
        request = decoded(payload, ConsumerCreateRequest)
        config = _as_named(request, names, is_durable=is_durable)
        if config.num_replicas > 1 and stream is not None and config_of(stream.record).num_replicas == 1:
            raise api_error("too_many_replicas")
        led = await self._led(stream)
        config = configs.stored(config)
        async with led.changing:
            stream_config = led.stream_config()
            config = configs.with_defaults(config, stream_config, is_pedantic=request.pedantic)
            configs.check(config, stream_config)
            name = config.durable_name or config.name
            served = led.consumers.get(name) if name else None
            if served is not None:
                await self._update(led, served, config, request, stream_config)
            else:
                served = await self._add(led, name, config, request, stream_config)
            if config.is_push:  # its subscriber may have come just before
                await led.leaf.quiesced()
                served.check_interest()
            info = await self._info(led, served)  # before the first delivery
            served.begin()
            return info

    async def _add(
        self,
        led: LedConsumers,
        name: str,
        config: ConsumerConfig,
        request: ConsumerCreateRequest,
        stream_config: StreamConfig,
    ) -> ServedConsumer:
        if request.action == "update":
            raise consumer_error("does_not_exist")
        most = stream_config.max_consumers if stream_config.max_consumers > 0 else _MOST_CONSUMERS
        if len(led.consumers) >= most:
            raise consumer_error("maximum_consumers_limit")
        if stream_config.retention == "workqueue" and not config.direct:
            await self._require_work_queue(led, config, name, is_new=True)
        if len(name.encode()) > configs.MAX_NAME_BYTES:
            raise consumer_error("name_too_long", configs.MAX_NAME_BYTES)
        if not name:
            name = _free_name(led)
        config = configs.with_threshold(config, is_durable=bool(config.durable_name))
        log, keeps_one = led.stream.usable_log(), stream_config.max_msgs_per_subject == 1
        loop = asyncio.get_running_loop()
        start = await loop.run_in_executor(led.readers, lambda: start_of(log, config, keeps_one=keeps_one))
        record = ConsumerRecord(
            created_us=now_us(),
            config=config,
            start=start.seq,
            resume=start.resume,
            skip=packed(start.skip.reshape(1, -1)),
        )
        consumer_id = secrets.token_hex(8)
        await led.stream.companion.append([consumer_records.consumer(name, consumer_id, record.to_bytes())])
        served = await led.add(name, consumer_records.StoredConsumer(consumer_id, record.to_bytes()))
        led.advise("created", served)
        return served

    async def _require_work_queue(self, led: LedConsumers, config: ConsumerConfig, name: str, *, is_new: bool) -> None:
        """In a thread: each filter of each consumer is compared."""
        check = partial(configs.require_work_queue, config, name, led.configs(), is_new=is_new)
        await asyncio.get_running_loop().run_in_executor(led.readers, check)

    async def _update(
        self,
        led: LedConsumers,
        served: ServedConsumer,
        config: ConsumerConfig,
        request: ConsumerCreateRequest,
        stream_config: StreamConfig,
    ) -> None:
        was = served.record.config
        config = configs.stored(msgspec.structs.replace(config, pause_until=was.pause_until))
        if request.action == "create" and not configs.are_equal(config, was):
            raise consumer_error("already_exists")
        if stream_config.retention == "workqueue":
            await self._require_work_queue(led, config, served.name, is_new=False)
        is_bound = led.leaf.interest.has(was.deliver_subject) if was.is_push else False
        configs.require_updatable(was, config, is_bound=is_bound)
        if config.inactive_threshold != was.inactive_threshold:
            config = configs.with_threshold(config, is_durable=bool(was.durable_name))
        if config == was:
            return
        record = msgspec.structs.replace(served.record, config=config)
        await led.stream.companion.append([consumer_records.consumer(served.name, served.id, record.to_bytes())])
        served.change(record)
        if config.filters != was.filters:
            led.retention.begin_again()

    def require_within_limits(self, stream: HostedStream, was: StreamConfig, now: StreamConfig) -> None:
        """Raises ApiError: limits of the stream that have changed exclude some of its consumers."""
        led = self.serving.of(stream)
        age, most = now.consumer_limits.inactive_threshold, now.consumer_limits.max_ack_pending
        has_changed = now.consumer_limits != was.consumer_limits and (age > 0 or most > 0)
        consumers = led.configs() if led is not None and has_changed else {}
        beyond = [
            name
            for name, one in sorted(consumers.items())
            if 0 < age < one.inactive_threshold or 0 < most < one.max_ack_pending
        ]
        if beyond:
            raise api_error("limits_violate", ", ".join(beyond))

    async def quiesced(self, stream: HostedStream) -> None:
        """As `LedConsumers.quiesced`."""
        if (led := self.serving.of(stream)) is not None:
            await led.quiesced()

    async def purged(self, stream: HostedStream, pattern: str) -> None:
        """As `LedConsumers.purged`."""
        if (led := self.serving.of(stream)) is not None:
            await led.purged(pattern)

    async def retention_changed(self, stream: HostedStream) -> None:
        """Returns when messages that are not needed any more are removed. Raises NatslogError."""
        if (led := self.serving.of(stream)) is not None:
            await led.remove_unneeded()

    # ---- others ----

    async def info(self, stream: HostedStream | None, name: str, payload: bytes) -> dict[str, Any]:
        if not is_empty(payload):
            raise api_error("not_empty")
        led = await self._led(stream)
        served = led.consumers.get(name)
        if served is None:
            raise api_error("consumer_not_found")
        return await self._info(led, served)

    async def pause(self, stream: HostedStream | None, name: str, payload: bytes) -> dict[str, Any]:
        request = decoded(payload, ConsumerPauseRequest) if has_fields(payload) else ConsumerPauseRequest()
        until = configs.time_in_utc(request.pause_until) if request.pause_until else ""
        led = await self._led(stream)
        async with led.changing:
            served = led.consumers.get(name)
            if served is None:
                raise api_error("consumer_not_found")
            config = configs.stored(msgspec.structs.replace(served.record.config, pause_until=until))
            record = msgspec.structs.replace(served.record, config=config)
            await led.stream.companion.append([consumer_records.consumer(name, served.id, record.to_bytes())])
            served.change(record)
            served.begin()
        return {"paused": False, "pause_until": until or NO_TIME} | _pause_of(config)

    async def delete(self, stream: HostedStream | None, name: str, payload: bytes) -> dict[str, Any]:
        if not is_empty(payload):
            raise api_error("not_empty")
        led = await self._led(stream)
        async with led.changing:
            served = led.consumers.get(name)
            if served is None:
                raise api_error("consumer_not_found")
            await led.stream.companion.append([consumer_records.deleted(served.name, served.id)])
            await led.remove(served, "409 Consumer Deleted")
            led.advise("deleted", served)
        return {"success": True}

    async def names(self, stream: HostedStream | None, payload: bytes) -> dict[str, Any]:
        request, names, consumers = await self._page(stream, payload)
        page = names[request.offset :][:NAMES_LIMIT]
        return _paged(request, len(consumers), NAMES_LIMIT) | {"consumers": page}

    async def infos(self, stream: HostedStream | None, payload: bytes) -> dict[str, Any]:
        request, names, consumers = await self._page(stream, payload)
        led = await self._led(stream) if consumers else None
        found = []
        for name in names[request.offset :][:LIST_LIMIT]:
            assert led is not None, "there are consumers"
            if (served := led.consumers.get(name)) is not None:
                found.append(await self._info(led, served, is_listed=True))
        return _paged(request, len(consumers), LIST_LIMIT) | {"consumers": found}

    async def _page(
        self, stream: HostedStream | None, payload: bytes
    ) -> tuple[PagedRequest, list[str], dict[str, ServedConsumer]]:
        request = decoded(payload, PagedRequest) if has_fields(payload) else PagedRequest()
        request = msgspec.structs.replace(request, offset=max(0, request.offset))
        if stream is None:
            raise api_error("stream_not_found")
        led = await self.serving.begun(stream)
        consumers = {} if led is None else led.consumers
        shown = [name for name, served in consumers.items() if not served.record.config.direct]
        return request, sorted(shown), consumers

    async def _info(self, led: LedConsumers, served: ServedConsumer, *, is_listed: bool = False) -> dict[str, Any]:
        left = await led.reconcile(served)
        machine, record, at_us = served.machine, served.record, led.now_us()

        def pair(numbers: tuple[int, int], last_us: int) -> dict[str, Any]:
            found: dict[str, Any] = {"consumer_seq": numbers[0], "stream_seq": numbers[1]}
            return found | ({"last_active": time_of(now_us() - (at_us - last_us))} if last_us else {})

        body: dict[str, Any] = {
            "stream_name": led.stream.name,
            "name": served.name,
            "created": time_of(record.created_us),
            "config": configs.shown(record.config, {} if is_listed else self._dynamic),
            "delivered": pair(machine.delivered, machine.delivered_us),
            "ack_floor": pair(machine.floor, machine.acked_us),
            "num_ack_pending": len(machine.pending),
            "num_redelivered": machine.num_redelivered,
            "num_waiting": len(machine.pulls),
            "num_pending": left,
        }
        if record.config.is_push and machine.push.active:
            body["push_bound"] = True
        body |= _pause_of(record.config)
        if (cluster := self._cluster_of(led.stream.record)) is not None:
            body["cluster"] = cluster
        return body | {"ts": time_of(now_us())}


def _pause_of(config: ConsumerConfig) -> dict[str, Any]:
    """Fields that state that it is paused, while it is."""
    left_us = parse_timestamp_us(config.pause_until) - now_us() if config.pause_until else 0
    return {"paused": True, "pause_remaining": left_us * 1000} if left_us > 0 else {}


def _as_named(request: ConsumerCreateRequest, names: list[str], *, is_durable: bool) -> ConsumerConfig:
    """The configuration with the name that is in the subject. Raises ApiError: they contradict each other."""
    config = request.config
    stream, name, filtered = names[0], names[1] if len(names) > 1 else "", ".".join(names[2:])
    if stream != request.stream_name:
        raise api_error("name_mismatch")
    if {"/", "\\"} & set(name or config.name):
        raise consumer_error("name_contains_path_separators")
    if is_durable and not config.durable_name:
        raise consumer_error("durable_name_not_set")
    if name and config.durable_name and name != config.durable_name:
        raise consumer_error("durable_name_not_match_subject")
    if not name and config.durable_name:
        raise consumer_error("ephemeral_with_durable_name")
    if filtered and config.filter_subjects:
        raise consumer_error("multiple_filters_not_allowed")
    if filtered and config.filter_subject != filtered:
        raise consumer_error("filter_subject_mismatch")
    return msgspec.structs.replace(config, name=name) if name else config


def _free_name(led: LedConsumers) -> str:
    while True:
        name = "".join(secrets.choice(_NAME_LETTERS) for _ in range(_NAME_CHARS))
        if name not in led.consumers:
            return name


def _paged(request: PagedRequest, total: int, limit: int) -> dict[str, Any]:
    return {"total": total, "offset": min(request.offset, total), "limit": limit}
