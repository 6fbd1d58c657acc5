"""The API's subjects on NATS: which requests this broker answers, and how.

Theory of operation. Every broker subscribes to the same subjects, and exactly one of them answers a request: the
metadata leader where a stream is created or listed, or does not exist, and otherwise the leader of the stream. The
others ignore it. While there is no leader, no broker answers, and the client's request times out, as with the server.

A request is answered after all that the same client has sent before: messages come over another connection than
requests, so the leader of the stream asks the server on that connection, and waits until what has arrived by then is
committed (`HostedStream.quiesced`).

If the NATS server has JetStream enabled for this account, it answers `$JS.API` itself: then the subjects begin with
`$JS.natslog.API`, as those of a JetStream domain do. This is found out with each new connection, and looked at
again from time to time.

Requests whose reply subject begins with `$` are ignored: their answer could be another request.

Bounds: at most `_MOST_WAITING` requests, of `_MOST_BYTES` together, wait or are being answered; more are dropped, and
counted in the log. So are requests that have waited for `_STALE_S`: a change must not happen long after its client has
given up.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from natslog.errors import NatslogError
from natslog.jetstream import direct
from natslog.jetstream.direct_groups import DirectGroups, log_failed_answer
from natslog.jetstream.endpoints import BY_VERBS, ENDPOINTS, MOST_VERBS, ApiCall, Endpoint
from natslog.jetstream.errors import ApiError, api_error, of_error
from natslog.jetstream.requests import API_LEVEL, required_level
from natslog.jetstream.streams import StreamCalls
from natslog.log_events import event
from natslog.model import StreamRecord
from natslog.node.broker import Broker
from natslog.node.replicas.jetstream import JetStreamState
from natslog.node.replicas.stream import HostedStream
from natslog.node.supervisor import Supervisor
from natslog.wire.api_probe import (
    BROKER_HEADER,
    CLUSTER_HEADER,
    clusters_in,
    headers_of_answers,
    is_of_broker,
)
from natslog.wire.direct_frames import taken_requests
from natslog.wire.frames import Frames
from natslog.wire.layout import HEADER_LEN, PAYLOAD, PAYLOAD_LEN, REPLY, REPLY_LEN, SUBJECT, SUBJECT_LEN

logger = logging.getLogger("natslog.jetstream")

DOMAIN = "natslog"
_INBOX = "_INBOX.natslog."
PREFIX = "$JS.API"
DOMAIN_PREFIX = f"$JS.{DOMAIN}.API"
_PREFIXES = {"on": PREFIX, "domain": DOMAIN_PREFIX}
_STATE_DOMAIN = ("account_info", "stream_info", "stream_update")
_TYPES = "io.nats.jetstream.api.v1."
_MOST_WAITING = 10_000
_AT_ONCE = 64
_CHANGES_AT_ONCE = 8
_PROBE_S = 2.0
_PROBE_EVERY_S = 1.0
_PROBE_POLL_S = 0.01
_LOG_EVERY_S = 5.0
_SETTLED_WITHIN_S = 4.0
_LED_WITHIN_S = 3.0
_LED_POLL_S = 0.02
_STALE_S = 10.0
_LOOK_AGAIN_S = 10.0
_MOST_REQUEST_BYTES = 512 * 1024
_MOST_BYTES = 32 * 1024 * 1024
_HEADER_ROOM_BYTES = 256
_DOLLAR = ord("$")


class JetStreamApi:
    """Of one broker. `start` and `stop` it in the event loop.

    Attributes:
        served: how it is served; None until that was found out.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._link = broker.link.lane("jetstream")
        self._me = broker.cluster.me
        self._calls = StreamCalls(broker)
        self.consumers, self.advisories = self._calls.consumers.serving, self._calls.advisories
        self.states_here = self._calls.states_here
        self.served: JetStreamState | None = None
        self._attachment: object | None = None
        self._tasks = Supervisor(broker.halt)
        self._answering = Supervisor(log_failed_answer)
        self._waiting_bytes = 0
        self._room, self._changing = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_CHANGES_AT_ONCE)
        self._groups = DirectGroups(
            broker,
            leads=lambda stream: self._calls.led_here(stream.name) is stream,
            room=self._room,
            most_answer_bytes=lambda: self._link.max_payload_bytes,
            settled_within_s=_SETTLED_WITHIN_S,
        )
        self._state: JetStreamState | None = None  # being served; `served`: it is
        self._probed_connection = -1
        self._total = self._failed = self._dropped = 0
        self._complained_s = -_LOG_EVERY_S

    # ---- life ----

    async def start(self) -> None:
        """Unless the settings turn it off. Returns when requests are answered, when it is known that they are not, or
        without a connection to NATS.
        """
        broker, mode, has_security = self._broker, self._broker.config.jetstream, self._broker.guard.is_on
        if mode == "auto" and has_security:
            logger.info(
                "the JetStream API is off, because security is enabled: who may publish to $JS.API could create and "
                "delete streams. To turn it on, set jetstream = on, and limit these subjects by NATS permissions",
                extra=event("jetstream.off"),
            )
        if mode == "off" or (mode == "auto" and has_security):
            self.served = "off"
            return
        self._tasks.start(self._run(), "the JetStream API")
        while (  # noqa: ASYNC110 (a lost connection sets no event)
            self.served is None and self._link.is_up and not broker.stopping_soon.is_set()
        ):
            await asyncio.sleep(_PROBE_POLL_S)

    async def stop(self) -> None:
        """Requests that have arrived are answered first, as far as that is possible within a second."""
        await self._tasks.stop()
        await self._detach()
        await self.consumers.end_all("409 Server Shutdown")
        answering = (self._answering, self._groups.tasks)
        await asyncio.gather(*(one.ended(within_s=1.0) for one in answering))
        await asyncio.gather(*(one.stop(within_s=1.0) for one in answering))
        self._state = self.served = "off"

    async def _detach(self) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            await self._link.detach(attachment)

    async def _run(self) -> None:
        """Finds out with each connection which subjects to serve."""
        looked_s = 0.0
        while True:
            is_new = self._link.connections != self._probed_connection
            looks_again = self.served == "on" and time.monotonic() - looked_s > _LOOK_AGAIN_S
            if self._link.is_up and (is_new or looks_again):
                connection, looked_s = self._link.connections, time.monotonic()
                try:
                    found = await self._found_out()
                    if is_new or found != "forbidden":
                        await self._serve(found)
                    self._probed_connection = connection
                except NatslogError as error:
                    logger.warning(
                        f"the JetStream API is not served yet: {error.message}",
                        extra=event("jetstream.not_served", reason=error.code),
                    )
            await asyncio.sleep(_PROBE_EVERY_S if self._probed_connection >= 0 else _PROBE_POLL_S)

    async def _serve(self, state: JetStreamState) -> None:
        if state == self._state == self.served:
            return
        self._state = None  # until all of it is served
        await self._detach()
        forbidden = self._link.forbidden
        if state in _PREFIXES:
            prefix = _PREFIXES[state]
            subjects = tuple(f"{prefix}.{endpoint.subject}" for endpoint in ENDPOINTS)
            self._attachment = await self._link.attach(subjects, self._receive)
            if self._link.forbidden > forbidden:
                await self._detach()
                state = "forbidden"
        self._state = state
        await self._serve_direct_requests()
        await self.consumers.serve(_PREFIXES.get(state))
        self.served = state
        if state == "forbidden":
            logger.warning(
                "the JetStream API is not served, because the NATS user of this broker lacks permissions: it needs "
                f"to publish to {PREFIX}.INFO, and to subscribe to {PREFIX}.> ({DOMAIN_PREFIX}.> if the server has "
                f"JetStream) and {_INBOX}>; the section Permissions of docs/JETSTREAM.md has all. Restart the broker "
                "when they are granted, or set jetstream = off",
                extra=event("jetstream.forbidden"),
            )
        elif state == "conflict":
            logger.warning(
                "the JetStream API is not served, because another natslog cluster serves it in the same NATS account: "
                "set jetstream = off for one of them, or use another NATS account. This broker looks again when it is "
                "started, or connects to NATS again",
                extra=event("jetstream_conflict"),
            )
        elif state == "domain":
            logger.warning(
                "the NATS server has JetStream enabled for this account, so natslog does not answer $JS.API. Its API "
                f"is at {DOMAIN_PREFIX}.> (JetStream domain {DOMAIN!r}). To use natslog in place of JetStream, "
                "disable JetStream there",
                extra=event("jetstream.domain_only"),
            )
        else:
            logger.info("serving the JetStream API", extra=event("jetstream.on"))

    async def _found_out(self) -> JetStreamState:
        """`domain`: somebody other than the brokers of natslog answers `$JS.API.INFO`. `forbidden`: that may not be
        asked. `conflict`: brokers of another cluster answer; of two that serve already, the one whose id comes first
        goes on.

        Raises:
            NatsUnavailable.
        """
        found = await headers_of_answers(
            self._link, f"{PREFIX}.INFO", f"{_INBOX}{secrets.token_hex(8)}", within_s=_PROBE_S
        )
        if found is None:
            return "forbidden"
        if not all(map(is_of_broker, found)):
            return "domain"
        own = self._broker.cluster.cluster_id
        others = {one for headers in found for one in clusters_in(headers)} - {own}
        goes_on = not others or (self.served == "on" and own < min(others))
        return "on" if goes_on else "conflict"

    def domain(self) -> str:
        """The domain that acks name, or empty."""
        return DOMAIN if self._state == "domain" else ""

    # ---- direct requests ----

    def direct_subjects(self, record: StreamRecord) -> tuple[str, ...]:
        prefix = _PREFIXES.get(self._state or "off")
        return () if prefix is None else tuple(f"{prefix}.{endpoint}" for endpoint in direct.endpoints(record))

    async def _serve_direct_requests(self) -> None:
        """Of all streams that this broker leads."""
        for stream in list(self._broker.streams.values()):
            await stream.serve_direct_requests()

    def receive_direct(self, stream: HostedStream, frames: Frames) -> None:
        api_bytes, domain_bytes = (len(f"{one}.{direct.PREFIX}{stream.name}") for one in (PREFIX, DOMAIN_PREFIX))
        requests, others = taken_requests(frames, api_bytes, domain_bytes)
        room = max(0, _MOST_WAITING - self._waiting)
        if self._size_bytes + requests.nbytes > _MOST_BYTES:
            room = 0
        if len(requests) > room:
            self._drop(len(requests) - room)
            requests = requests.take(np.arange(room))
        if len(requests):
            self._groups.add(stream, requests)
        for row in [] if others is None else others.rows.tolist():
            if self._has_room(row):
                self._begin(self._answer_direct(stream, *_parts(frames, row)), row[PAYLOAD_LEN])

    async def _answer_direct(
        self, stream: HostedStream, subject: bytes, reply: bytes, block: bytes, payload: bytes
    ) -> None:
        try:
            if required_level(block) > API_LEVEL:
                raise direct.Status(412, "Required Api Level")
            key = subject.decode(errors="replace").partition(f".{direct.PREFIX}{stream.name}.")[2]
            request = direct.request_of(key, payload)
            async with asyncio.timeout(_SETTLED_WITHIN_S):
                await stream.quiesced(is_on_its_connection=True)
            async with self._room:
                answers = await self._calls.direct(stream, request)
        except direct.Status as status:
            answers = [direct.Answer(status.headers)]
        except UnicodeDecodeError:
            answers = [direct.Answer(direct.Status(408, "Bad Request").headers)]
        except TimeoutError:
            answers = [direct.Answer(direct.Status(503, "Stream Not Available").headers)]
        except NatslogError as error:
            logger.warning(
                f"a direct request to stream {stream.name} failed: {error.message}",
                extra=event("jetstream.request_failed", stream=stream.name, reason=error.code),
            )
            answers = [direct.Answer(direct.Status(500, "Internal Error").headers)]
        except Exception:  # a bug: one request fails, and nothing else
            logger.exception(
                f"a direct request to stream {stream.name} failed",
                extra=event("jetstream.request_error", stream=stream.name),
            )
            answers = [direct.Answer(direct.Status(500, "Internal Error").headers)]
        most_bytes = self._link.max_payload_bytes
        if any(len(headers) + len(payload) > most_bytes for headers, payload in answers):
            answers = [direct.Answer(direct.Status(500, "Message Exceeds Maximum Payload").headers)]
        if self._calls.led_here(stream.name) is stream:
            await stream.nats.send(b"".join(direct.frame(reply, answer) for answer in answers))

    # ---- requests ----

    def _receive(self, frames: Frames) -> None:
        """Most requests are for another broker: what is known of the stream now decides it, whatever changes later."""
        for row in frames.rows.tolist():
            if row[REPLY_LEN] and frames.buffer[row[REPLY]] == _DOLLAR:
                continue
            tokens = _tokens(frames.buffer[row[SUBJECT] : row[SUBJECT] + row[SUBJECT_LEN]].tobytes())
            verbs = next(verbs for count in range(MOST_VERBS, 0, -1) if (verbs := tuple(tokens[:count])) in BY_VERBS)
            endpoint, names = BY_VERBS[verbs], tokens[len(verbs) :]
            record = self._calls.named(names[0]) if endpoint.at_stream else None
            answers_here = self._broker.cluster.group.is_leader if record is None else record.leader == self._me
            if answers_here and self._has_room(row):
                request = ApiCall(names, *_parts(frames, row)[1:], is_known=record is not None)
                self._begin(self._answer(endpoint, request), row[PAYLOAD_LEN])

    @property
    def _waiting(self) -> int:
        return len(self._answering) + self._groups.count

    @property
    def _size_bytes(self) -> int:
        """Of the requests that wait."""
        return self._waiting_bytes + self._groups.size_bytes

    def _has_room(self, row: list[int]) -> bool:
        """Whether one more request may wait."""
        waits = self._waiting < _MOST_WAITING and self._size_bytes + row[PAYLOAD_LEN] <= _MOST_BYTES
        if not waits:
            self._drop()
        return waits

    def _begin(self, answering: Coroutine[Any, Any, None], size_bytes: int) -> None:
        def ended(_: asyncio.Task[None]) -> None:
            self._waiting_bytes -= size_bytes

        self._waiting_bytes += size_bytes
        self._answering.start(answering, "a JetStream request").add_done_callback(ended)

    def _drop(self, count: int = 1) -> None:
        self._dropped += count
        if time.monotonic() - self._complained_s >= _LOG_EVERY_S:
            self._complained_s = time.monotonic()
            logger.error(
                f"too many requests to the JetStream API wait, or they have waited for more than {_STALE_S:.0f} s: "
                f"{self._dropped} were dropped so far",
                extra=event("jetstream.requests_dropped", count=self._dropped),
            )

    async def _answer(self, endpoint: Endpoint, request: ApiCall) -> None:
        body: dict[str, Any] | None
        try:
            body = await self._body(endpoint, request)
        except ApiError as error:
            body = {**endpoint.beside_error, "error": error.to_json()}
        except NatslogError as error:
            answer = of_error(error)
            what = ("the JetStream request %s failed: %s", endpoint.subject, error.message)
            if answer.code >= 500:
                logger.warning(
                    *what, extra=event("jetstream.request_failed", subject=endpoint.subject, reason=error.code)
                )
            else:
                logger.debug(*what)
            body = {**endpoint.beside_error, "error": answer.to_json()}
        except Exception:  # a bug: one request fails, and nothing else
            logger.exception(
                f"the JetStream request {endpoint.subject} failed",
                extra=event("jetstream.request_error", subject=endpoint.subject),
            )
            body = {**endpoint.beside_error, "error": api_error("internal").to_json()}
        if body is None:
            return
        self._total += 1
        self._failed += "error" in body
        if request.reply:
            self._send(endpoint, request.reply, {"type": f"{_TYPES}{endpoint.kind}_response"} | body)

    async def _body(self, endpoint: Endpoint, request: ApiCall) -> dict[str, Any] | None:
        """None: another broker answers, or there is no leader. Raises ApiError, NatslogError."""
        arrived_s = time.monotonic()
        stream = None
        if request.is_known:
            stream = await self._led_soon(request.names[0])
            if stream is None and self._calls.named(request.names[0]) is not None:
                return None  # another broker leads it now
        elif not self._broker.cluster.group.is_leader or not await self._broker.up_to_date():
            return None
        elif endpoint.at_stream and self._calls.named(request.names[0]) is not None:
            return None  # created meanwhile
        if len(request.payload) > _MOST_REQUEST_BYTES:
            raise api_error("request_too_large", _MOST_REQUEST_BYTES)
        if required_level(request.headers) > API_LEVEL:
            raise api_error("level_required")
        if stream is not None:
            try:
                async with asyncio.timeout(_SETTLED_WITHIN_S):
                    await stream.quiesced()
                    await self._calls.consumers.quiesced(stream)
            except TimeoutError as error:  # too few replicas are in sync to commit what was received
                raise api_error("unavailable") from error
            request = replace(request, stream=stream)
        async with self._changing if endpoint.is_change else self._room:
            if time.monotonic() - arrived_s > _STALE_S:  # its client has given up
                self._drop()
                return None
            body = await endpoint.call(self._calls, request)
        if self._state == "domain" and endpoint.kind in _STATE_DOMAIN:
            body["domain"] = DOMAIN
        if endpoint.kind == "account_info":
            body["api"] = {"level": API_LEVEL, "total": self._total, "errors": self._failed}
        if stream is not None and endpoint.kind != "stream_delete" and self._calls.led_here(stream.name) is not stream:
            return None  # another broker leads the stream now: what was read here may be outdated
        return body

    async def _led_soon(self, name: str) -> HostedStream | None:
        """The stream, as soon as this broker leads it, which its record states; None if that takes too long."""
        deadline_s = time.monotonic() + _LED_WITHIN_S
        while (stream := self._calls.led_here(name)) is None and time.monotonic() < deadline_s:
            record = self._calls.named(name)
            if record is None or record.leader != self._me:
                return None
            await asyncio.sleep(_LED_POLL_S)
        return stream

    def _send(self, endpoint: Endpoint, reply: bytes, body: dict[str, Any]) -> None:
        payload = msgspec.json.encode(body)
        if len(payload) > (most := self._link.max_payload_bytes - _HEADER_ROOM_BYTES):  # would end the connection
            error = api_error("answer_too_large", len(payload), most)
            payload = msgspec.json.encode({"type": body["type"], **endpoint.beside_error, "error": error.to_json()})
        if endpoint.kind != "account_info":
            self._link.send_now(direct.frame(reply, direct.Answer(b"", payload)))
            return
        broker, cluster = self._broker.cluster.me, self._broker.cluster.cluster_id
        headers = f"NATS/1.0\r\n{BROKER_HEADER}: {broker}\r\n{CLUSTER_HEADER}: {cluster}\r\n\r\n".encode()
        self._link.send_now(direct.frame(reply, direct.Answer(headers, payload)))


def _tokens(subject: bytes) -> list[str]:
    """Behind the prefix of the API."""
    prefix = PREFIX if subject.startswith(PREFIX.encode() + b".") else DOMAIN_PREFIX
    return subject.decode(errors="replace").removeprefix(f"{prefix}.").split(".")


def _parts(frames: Frames, row: list[int]) -> tuple[bytes, bytes, bytes, bytes]:
    """Copies of subject, reply subject, headers and payload."""
    starts = (row[SUBJECT], row[REPLY], row[PAYLOAD] - row[HEADER_LEN], row[PAYLOAD])
    lengths = (row[SUBJECT_LEN], row[REPLY_LEN], row[HEADER_LEN], row[PAYLOAD_LEN])
    subject, reply, headers, payload = (
        frames.buffer[start : start + length].tobytes() for start, length in zip(starts, lengths, strict=True)
    )
    return subject, reply, headers, payload
