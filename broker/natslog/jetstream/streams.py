"""Calls of the API that concern streams: made of the operations that HTTP uses as well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from natslog.cluster.stream_changes import require_deletable, require_purgeable, wanted_replicas
from natslog.errors import InvalidRequest, MessageNotFound, OffsetOutOfRange, RemovalDenied, StreamSealed
from natslog.jetstream import direct, stored_messages
from natslog.jetstream.advisories import StreamAdvisories
from natslog.jetstream.consumers.calls import ConsumerCalls
from natslog.jetstream.consumers.serving import ConsumerServing
from natslog.jetstream.errors import api_error, invalid_config
from natslog.jetstream.peers import broker_name, peers
from natslog.jetstream.requests import (
    API_LEVEL,
    MessageDeleteRequest,
    MessageGetRequest,
    PurgeRequest,
    StreamInfoRequest,
    StreamsRequest,
    decoded,
    has_fields,
    is_empty,
)
from natslog.jetstream.stream_config import (
    StreamConfig,
    StreamConfigRequest,
    are_equal,
    checked,
    config_of,
    first_offset_of,
    is_shown,
    require_updatable,
    settings_of,
    shown,
    updated_settings,
)
from natslog.jetstream.stream_state import StreamState, state_of, subjects_of, time_of
from natslog.log import StreamLog
from natslog.model import BrokerId, Offset, StreamRecord
from natslog.node.broker import Broker
from natslog.node.clock import now_us
from natslog.node.replicas.stream import HostedStream
from natslog.subjects import check_subject

Result = TypeVar("Result")

SERVER_VERSION = "2.15.1"
"""Of the server whose API this is: clients compare it to find out what they may use."""
DYNAMIC = {"_nats.ver": SERVER_VERSION, "_nats.level": str(API_LEVEL)}
NAMES_LIMIT = 1024
LIST_LIMIT = 256
_ASK_WITHIN_S = 4.0
_STATE_TRIES, _STATE_RETRY_S = 30, 0.1
_READ_TRIES = 3
_UNSUBSCRIBED_TRIES, _UNSUBSCRIBED_POLL_S = 400, 0.005


class StreamCalls:
    """Each call returns the fields of its answer, or raises ApiError or NatslogError."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.advisories = StreamAdvisories(broker)
        self.consumers = ConsumerCalls(ConsumerServing(broker), DYNAMIC, self._cluster_of_several)

    # ---- what is where ----

    def named(self, name: str) -> StreamRecord | None:
        record: StreamRecord | None = self._broker.state.streams.get(name) if is_shown(name) else None
        return record

    def led_here(self, name: str) -> HostedStream | None:
        """The stream, if this broker leads it."""
        record = self.named(name)
        stream = self._broker.streams.get(name) if record is not None else None
        return stream if stream is not None and self._broker.positions.is_led_here(stream) else None

    def records(self) -> list[StreamRecord]:
        streams: Iterable[StreamRecord] = self._broker.state.streams.values()
        return sorted((one for one in streams if is_shown(one.name)), key=lambda one: one.name)

    async def states(self, records: list[StreamRecord]) -> dict[str, StreamState]:
        """As far as their leaders answer."""
        by_leader: dict[BrokerId, list[str]] = {}
        for record in records:
            if record.leader is not None:
                by_leader.setdefault(record.leader, []).append(record.name)
        asked = [self._states_of(leader, names) for leader, names in by_leader.items()]
        return {name: state for found in await asyncio.gather(*asked) for name, state in found.items()}

    async def _states_of(self, leader: BrokerId, names: list[str]) -> dict[str, StreamState]:
        if leader == self._broker.cluster.me:
            return await self.states_here(names)
        requests = self._broker.cluster.requests
        answer = await requests.ask_if_up(leader, "jetstream_states", _ASK_WITHIN_S, names=names)
        return msgspec.convert(answer or {}, dict[str, StreamState])

    async def states_here(self, names: list[str]) -> dict[str, StreamState]:
        """Of those that are led here, for other brokers."""
        found: dict[str, StreamState] = {}
        for name in names:
            if (stream := self.led_here(name)) is not None:
                found[name] = await self._state(stream)
        return found

    async def _state(self, stream: HostedStream, *, deleted: bool = False) -> StreamState:
        state = await self._read(stream, lambda log: state_of(log, deleted=deleted))
        state.consumer_count = len(stream.consumers)
        return state

    async def _read(self, stream: HostedStream, work: Callable[[StreamLog], Result]) -> Result:
        """In a reader's thread; again where a limit has moved the start of the log meanwhile."""
        log, loop = stream.usable_log(), asyncio.get_running_loop()
        for _ in range(_READ_TRIES):
            try:
                return await loop.run_in_executor(self._broker.readers, work, log)
            except OffsetOutOfRange:
                continue
        return await loop.run_in_executor(self._broker.readers, work, log)

    def _info(
        self, record: StreamRecord, state: StreamState, *, dynamic: dict[str, str], with_cluster: bool = False
    ) -> dict[str, Any]:
        """The fields of a stream in an answer."""
        config = config_of(record, wanted_replicas(record))
        info = {
            "config": shown(config, dynamic),
            "created": time_of(record.created_us),
            "state": state,
        }
        if with_cluster:
            info["cluster"] = self._cluster_of(record)
        return info | {"ts": time_of(now_us())}

    def _cluster_of_several(self, record: StreamRecord) -> dict[str, Any] | None:
        return self._cluster_of(record) if len(self._broker.state.brokers) > 1 else None

    def _cluster_of(self, record: StreamRecord) -> dict[str, Any]:
        """Who leads the stream and who follows."""
        others = [one for one in record.replicas if one != record.leader]
        leader = {} if record.leader is None else {"leader": broker_name(record.leader)}
        replicas = peers(record, others)
        return {"name": self._broker.state.cluster_id} | leader | ({"replicas": replicas} if replicas else {})

    # ---- at the metadata leader ----

    async def account(self) -> dict[str, Any]:
        records = self.records()
        states = await self.states(records)
        used, reserved = {"file": 0, "memory": 0}, {"file": 0, "memory": 0}
        for record in records:
            config, state = config_of(record), states.get(record.name)
            used[config.storage] += state.bytes if state is not None else 0
            reserved[config.storage] += max(0, config.max_bytes)
        limits: dict[str, Any] = dict.fromkeys(_ACCOUNT_LIMITS, -1)
        return {
            "memory": used["memory"],
            "storage": used["file"],
            "reserved_memory": reserved["memory"],
            "reserved_storage": reserved["file"],
            "streams": len(records),
            "consumers": sum(state.consumer_count for state in states.values()),
            "limits": limits | {"max_bytes_required": False},
        }

    async def create(self, name: str, payload: bytes) -> dict[str, Any]:
        request = decoded(payload, StreamConfigRequest)
        if request.name != name:
            raise api_error("name_mismatch")
        if {"/", "\\"} & set(name):
            raise api_error("path_separators")
        if request.sealed:
            raise invalid_config("stream configuration for create can not be sealed")
        if request.mirror_direct and request.mirror is None:
            raise invalid_config("stream has no mirror but does have mirror direct")
        config = checked(request)
        self._require_brokers(config.num_replicas)
        self._require_tags(config)
        existing = self._broker.state.streams.get(name)
        if existing is not None and not are_equal(config_of(existing, wanted_replicas(existing)), config):
            raise api_error("name_in_use")
        if existing is None:
            self._require_own_subjects(name, config.subjects)
            operations = self._broker.stream_operations
            creating = operations.create(name, settings_of(config), first_offset=first_offset_of(config))
            await self._broker.change_cluster(creating)
        record, state = await self._state_soon(name)
        return self._info(record, state, dynamic=DYNAMIC) | {"did_create": True}

    async def _state_soon(self, name: str) -> tuple[StreamRecord, StreamState]:
        """Of a stream that was created; its first leader may just have changed."""
        for _ in range(_STATE_TRIES):
            record: StreamRecord = self._broker.state.stream(name)
            if (state := (await self.states([record])).get(name)) is not None:
                return record, state
            await asyncio.sleep(_STATE_RETRY_S)
        raise api_error("unavailable")

    def _require_brokers(self, replicas: int) -> None:
        if replicas > len(self._broker.cluster.usable()):
            raise api_error("too_many_replicas")

    def _require_tags(self, config: StreamConfig) -> None:
        tags = config.placement.tags if config.placement is not None else ()
        brokers = self._broker.state.brokers
        having = [one for one in self._broker.cluster.usable() if set(brokers[one].tags) >= set(tags)]
        if tags and len(having) < config.num_replicas:
            raise api_error("no_suitable_brokers", list(tags))

    def _require_own_subjects(self, name: str, subjects: tuple[str, ...]) -> None:
        """A message that two streams record would get two acks."""
        state = self._broker.state
        others = state.index.recording(subjects) - {name}
        acking = sorted(one for one in others if state.streams[one].settings.acks in ("reply", "any"))
        if acking:
            raise api_error("subjects_overlap", acking[0])

    async def names(self, payload: bytes) -> dict[str, Any]:
        request, records = self._listed(payload)
        page = [record.name for record in records[request.offset :][:NAMES_LIMIT]]
        return _paged(request, len(records), NAMES_LIMIT) | {"streams": page or None}

    async def infos(self, payload: bytes) -> dict[str, Any]:
        request, records = self._listed(payload)
        page = records[request.offset :][:LIST_LIMIT]
        states = await self.states(page)
        infos: list[dict[str, Any]] = []
        missing = [one.name for one in page if one.name not in states]
        room_bytes = self._broker.link.lane("jetstream").max_payload_bytes // 2
        for record in page:
            if record.name in states:
                info = self._info(record, states[record.name], dynamic={})
                room_bytes -= len(msgspec.json.encode(info))
                if room_bytes < 0 and infos:
                    break
                infos.append(info)
        body = _paged(request, len(records), LIST_LIMIT) | {"streams": infos}
        return body | ({"missing": missing} if missing else {})

    def _listed(self, payload: bytes) -> tuple[StreamsRequest, list[StreamRecord]]:
        request = decoded(payload, StreamsRequest) if has_fields(payload) else StreamsRequest()
        request = msgspec.structs.replace(request, offset=max(0, request.offset))
        subject = request.subject
        if not subject:
            return request, self.records()
        chosen = self._broker.state.index.recording([subject])
        return request, [record for record in self.records() if record.name in chosen]

    # ---- at the leader of a stream; None: there is no such stream ----

    async def info(self, stream: HostedStream | None, payload: bytes) -> dict[str, Any]:
        request = decoded(payload, StreamInfoRequest) if has_fields(payload) else StreamInfoRequest()
        if stream is None:
            raise api_error("stream_not_found")
        state = await self._state(stream, deleted=request.deleted_details)
        page = {"total": 0, "offset": 0, "limit": 0}
        if pattern := request.subjects_filter:
            offset, most_bytes = max(0, request.offset), self._broker.link.lane("jetstream").max_payload_bytes // 2
            found = await self._read(stream, lambda log: subjects_of(log, pattern, offset, most_bytes))
            if found.total:
                page = {"total": found.total, "offset": offset, "limit": found.limit}
            if found.counts is not None:
                state.subjects = found.counts
        return page | self._info(stream.record, state, dynamic=DYNAMIC, with_cluster=True)

    async def update(self, name: str, stream: HostedStream | None, payload: bytes) -> dict[str, Any]:
        config = checked(decoded(payload, StreamConfigRequest))
        if config.name != name:
            raise api_error("name_mismatch")
        if stream is None:
            raise api_error("stream_not_found")
        record, operations = stream.record, self._broker.stream_operations
        was = config_of(record, wanted_replicas(record))
        if config.num_replicas > max(was.num_replicas, 1):
            self._require_brokers(config.num_replicas)
        config = require_updatable(was, config)
        self._require_tags(config)
        self.consumers.require_within_limits(stream, was, config)
        if set(config.subjects) != set(was.subjects):
            self._require_own_subjects(name, config.subjects)
        settings = updated_settings(record.settings, config)
        await self._broker.change_cluster(operations.replace_settings(record, settings))
        await stream.serve_direct_requests()
        if config.retention != was.retention:
            await self.consumers.retention_changed(stream)
        if config.sealed and not was.sealed:
            await self._broker.change_cluster(operations.seal(stream, is_part_of_update=True))
        return self._info(stream.record, await self._state(stream), dynamic=DYNAMIC)

    async def delete(self, stream: HostedStream | None, payload: bytes) -> dict[str, Any]:
        if not is_empty(payload):
            raise api_error("not_empty")
        if stream is None:
            raise api_error("stream_not_found")
        await self._broker.change_cluster(self._broker.stream_operations.delete(stream.name))
        for _ in range(_UNSUBSCRIBED_TRIES):  # a publisher must not get an ack of a stream that is deleted
            if not stream.is_subscribed:
                break
            await asyncio.sleep(_UNSUBSCRIBED_POLL_S)
        return {"success": True}

    async def purge(self, stream: HostedStream | None, payload: bytes) -> dict[str, Any]:
        request = decoded(payload, PurgeRequest) if has_fields(payload) else PurgeRequest()
        if request.seq and request.keep:
            raise api_error("bad_request")
        if stream is None:
            raise api_error("stream_not_found")
        try:
            require_purgeable(stream.record)
        except StreamSealed as error:
            raise api_error("sealed") from error
        except RemovalDenied as error:
            raise api_error("purge_denied") from error
        end = stream.usable_log().high_watermark
        below = min(request.seq - 1, end) if request.seq else end
        operations = self._broker.stream_operations
        if request.filter and request.filter != ">":
            try:
                check_subject(request.filter, wildcards=True)
            except InvalidRequest:
                return {"success": True, "purged": 0}
            purged = await operations.purge_subject(stream, request.filter, below, request.keep)
            await self.consumers.purged(stream, request.filter)
            return {"success": True, "purged": purged}
        if request.keep:
            below = await self._read(stream, lambda log: log.reader.start_of_newest(request.keep))
        purged = await self._read(stream, lambda log: _visible_below(log, below))
        if purged:
            await self._broker.change_cluster(operations.purge(stream, Offset(below)))
        await self.consumers.purged(stream, "")
        return {"success": True, "purged": purged}

    async def snapshot(self, stream: HostedStream | None) -> dict[str, Any]:
        raise api_error("stream_not_found") if stream is None else api_error("no_snapshots")

    async def restore(self) -> dict[str, Any]:
        raise api_error("no_restores")

    async def message(self, stream: HostedStream | None, payload: bytes) -> dict[str, Any]:
        if is_empty(payload):
            raise api_error("bad_request")
        request = decoded(payload, MessageGetRequest)
        stored_messages.require_one_choice(request)
        if stream is None:
            raise api_error("stream_not_found")
        return {"message": await self._read(stream, lambda log: stored_messages.message_of(log, request))}

    async def direct(self, stream: HostedStream, request: MessageGetRequest) -> list[direct.Answer]:
        """Raises `direct.Status`."""
        return await self._read(stream, lambda log: list(direct.answers_to(log, stream.name, request)))

    async def delete_message(self, stream: HostedStream | None, payload: bytes) -> dict[str, Any]:
        if is_empty(payload):
            raise api_error("bad_request")
        request = decoded(payload, MessageDeleteRequest)
        if stream is None:
            raise api_error("stream_not_found")
        try:
            require_deletable(stream.record)
        except StreamSealed as error:
            raise api_error("sealed") from error
        except RemovalDenied as error:
            raise api_error("delete_denied") from error
        first, end = await self._read(stream, _visible_range)
        if not first < request.seq <= end and config_of(stream.record).storage == "file":
            raise api_error("past_end" if request.seq > end else "nothing_to_delete")
        if not request.seq:
            raise api_error("sequence_not_found", 0)
        operations, offset = self._broker.stream_operations, request.seq - 1
        try:
            await operations.delete_message(stream, offset, erase=not request.no_erase)
        except MessageNotFound as error:
            raise api_error("sequence_not_found", request.seq) from error
        return {"success": True}


_ACCOUNT_LIMITS = (
    "max_memory",
    "max_storage",
    "max_streams",
    "max_consumers",
    "max_ack_pending",
    "memory_max_stream_bytes",
    "storage_max_stream_bytes",
)


def _paged(request: StreamsRequest, total: int, limit: int) -> dict[str, Any]:
    return {"total": total, "offset": min(request.offset, total), "limit": limit}


def _visible_range(log: StreamLog) -> tuple[int, int]:
    """The offset of the first visible message, and the high watermark."""
    end = log.high_watermark
    return log.visibility.removed_below(end).next_visible(log.first_readable_offset, end), end


def _visible_below(log: StreamLog, below: int) -> int:
    start = log.first_readable_offset
    return max(0, log.reader.count(start, below)) if below > start else 0
