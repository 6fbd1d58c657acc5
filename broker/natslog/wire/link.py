"""The connection to NATS: nats-py manages it (TLS, credentials, discovery, reconnects), and natslog reads the bytes.

Theory of operation. nats-py passes every received chunk to its parser object (`Client._ps`) with one `await
parse(data)` each, and resets it on reconnect. `FrameDemux` replaces this parser, and `InPlaceTransport` the transport
below it: frames of attached subscriptions go to their receiver as columns, everything else to nats-py's own parser. Raw
protocol is written to the same connection.

Invariant: while the link is open and a server can be reached, every attached subject is subscribed, also after nats-py
has permanently closed a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from nats.aio.client import Client
from nats.errors import ConnectionClosedError
from nats.errors import Error as NatsError

from natslog.errors import NatsLoginRefused, NatsUnavailable
from natslog.log_events import event
from natslog.urls import without_secrets
from natslog.wire.credentials import NatsCredentials
from natslog.wire.frames import Frames
from natslog.wire.nats_client import NatsClient, Problem, problem_of
from natslog.wire.transport import FrameDemux, InPlaceTransport, Receiver

__all__ = ["NatsCredentials", "NatsLink"]

logger = logging.getLogger("natslog.nats")

_RETRY_S = 0.25
_CANCELLATIONS = 20
_CONNECT_TIMEOUT_S = 3
_PENDING_BYTES = 64 * 1024 * 1024
_PING_EVERY_S = 1
_PINGS_UNANSWERED = 60  # as many seconds, so that data that waits on a slow network was sent before
_UNREACHABLE_S = 2.5


def _ignored(frames: Frames) -> None:
    """Receives frames without a subscription."""


async def _end_reconnecting(client: Client) -> None:
    """nats-py cancels this task once, which `asyncio.wait_for` may lose before Python 3.12: it would go on for ever."""
    task = client._reconnection_task
    for _ in range(_CANCELLATIONS):
        if task is None or task.done():
            return
        task.cancel()
        await asyncio.wait([task], timeout=_RETRY_S)


def _cancellations() -> int:
    """How often the current task was cancelled. Before Python 3.12, `asyncio.wait_for`, which nats-py calls, loses a
    cancellation that comes at the same moment as the result: such a task would go on, and keep a broker from stopping.
    """
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _forget(client: Client, sids: Iterable[int]) -> None:
    """nats-py subscribes again to what it has, if it reconnects before the server has answered."""
    for sid in sids:
        client._remove_sub(sid)


@dataclass(slots=True)
class _Attachment:
    """`sids`: by subject, of the connection `subscribed_by`. `group`: the number under which its demux has it."""

    subjects: tuple[str, ...]
    queue: str
    receiver: Receiver
    sids: dict[str, int] = field(default_factory=dict)
    group: int = 0
    subscribed_by: Client | None = None


class NatsLink:
    """One connection, kept up until `close`.

    Args:
        url: one or more server URLs, comma-separated.
        name: shown in the server's connection list.
        on_state: called with True when a connection is up and False when it is lost.

    Attributes:
        connections: how often one was made; if it has not changed, no sent data was lost. forbidden: how often the
        server refused for lack of permission; `last_refusal`: the server's text. shown_url: the URLs without user and
        password.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        credentials: NatsCredentials = NatsCredentials(),
        on_state: Callable[[bool], None] | None = None,
    ) -> None:
        self.url = url
        self._name = name
        self._credentials = credentials
        self._on_state = on_state or (lambda up: None)
        self._attachments: list[_Attachment] = []
        self._client: Client | None = None
        self._demux: FrameDemux | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._up = asyncio.Event()
        self._problem: Problem | None = None
        self.connections = 0
        self.forbidden = 0
        self.last_refusal = ""
        self.shown_url = without_secrets(url)

    @property
    def is_up(self) -> bool:
        return self._client is not None and self._client.is_connected

    @property
    def is_reachable(self) -> bool:
        """Whether the server, which gets a request once a second, has sent anything recently: an interrupted network
        delivers nothing.
        """
        return (
            self.is_up and self._demux is not None and time.monotonic() - self._demux.last_received_s < _UNREACHABLE_S
        )

    @property
    def max_payload_bytes(self) -> int:
        """The server's limit; 1 MiB until a server is connected."""
        return self._client.max_payload if self._client is not None else 1024 * 1024

    @property
    def is_refused(self) -> bool:
        """Whether there is no connection for a reason that only a change of settings, or of the server, removes."""
        return self._problem is not None and bool(self._problem.remedy or self._problem.is_complete)

    @property
    def has_problem(self) -> bool:
        """Whether an attempt to connect has failed since there was a connection."""
        return self._problem is not None

    @property
    def server_info(self) -> dict[str, Any]:
        """What the connected server states about itself (`INFO`); empty without one."""
        return {} if self._client is None else dict(self._client._server_info)

    @property
    def server_certificate(self) -> dict[str, Any] | None:
        """Of the connected server, decoded; None without TLS."""
        transport = None if self._client is None else self._client._transport
        return transport.server_certificate if isinstance(transport, InPlaceTransport) else None

    async def open(self) -> None:
        """Starts connecting; returns at once, whether or not a server is there.

        Raises:
            ConfigError: the credentials cannot be read.
        """
        self._credentials.check()
        self._supervisor = asyncio.create_task(self._supervise(), name="nats-link")

    async def wait_until_up(self, timeout_s: float) -> None:
        """Raises NatsUnavailable if no server answered in time; NatsLoginRefused if one did and refused the login."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            raise self._why_down() from None

    def _why_down(self) -> NatsUnavailable:
        problem = self._problem or Problem("no answer")
        if problem.is_login:
            return NatsLoginRefused(
                f"the NATS server at {self.shown_url} refused the login ({problem.text}): {problem.remedy}",
                url=self.shown_url,
            )
        if problem.remedy or problem.is_complete:
            return NatsUnavailable(f"cannot connect to NATS at {self.shown_url}: {problem.shown}", url=self.shown_url)
        return NatsUnavailable(
            f"no NATS server responds at {self.shown_url} ({problem.text}): start one, or correct the URL",
            url=self.shown_url,
        )

    async def _supervise(self) -> None:
        """Connects, and connects again when nats-py has permanently closed the connection."""
        while True:
            self._lost.clear()
            try:
                await self._connect()
            except Exception as error:  # nkeys has errors of its own, or is not installed; the next attempt may succeed
                self._note_error(error)
                await self._drop_client()  # a partial connection would stay subscribed beside the next one
                await asyncio.sleep(_RETRY_S)
                continue
            await self._lost.wait()
            self._report(False)
            await asyncio.sleep(_RETRY_S)

    async def _drop_client(self) -> None:
        client, self._client = self._client, None
        if client is not None and not client.is_closed:
            await client.close()

    def _note_error(self, error: BaseException) -> None:
        was_reset = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
        if was_reset and self._problem is not None and self._problem.remedy:
            return  # a server that refuses a client resets the connection, often before its error was read
        problem = problem_of(error, self._credentials)
        if problem != self._problem:
            logger.warning(
                f"cannot connect to NATS at {self.shown_url}: {problem.shown}; trying again",
                extra=event("nats.not_connected", address=self.shown_url),
            )
        self._problem = problem

    async def _connect(self) -> None:
        client = NatsClient(self._credentials)
        in_place = not self.url.lstrip().startswith("ws")
        self._demux = FrameDemux(client, in_place=in_place)
        client._ps = self._demux  # type: ignore[assignment]
        if in_place:
            client._transport = InPlaceTransport(self._demux)
        servers = [server.strip() for server in self.url.split(",") if server.strip()]
        await client.connect(
            servers,
            name=self._name,
            connect_timeout=_CONNECT_TIMEOUT_S,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=_RETRY_S,  # type: ignore[arg-type]  # any number of seconds will do
            ping_interval=_PING_EVERY_S,
            max_outstanding_pings=_PINGS_UNANSWERED,
            pending_size=_PENDING_BYTES,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_connected,
            closed_cb=self._on_closed,
            tls_handshake_first=self._credentials.tls_handshake_first,
        )
        self._client = client
        for attachment in self._attachments:
            await self._subscribe(attachment)
        await self.flush()
        await self._on_connected()

    async def _on_error(self, error: Exception) -> None:
        if "permissions violation" in str(error).lower():
            self.forbidden += 1
            self.last_refusal = str(error)
        if not self.is_up:
            self._note_error(error)
        else:
            logger.warning("NATS: %s", error, extra=event("nats.error"))

    async def _on_disconnected(self) -> None:
        self._report(False)

    async def _on_connected(self) -> None:
        self.connections += 1
        self._problem = None
        self._report(True)

    async def _on_closed(self) -> None:
        self._lost.set()

    def _report(self, up: bool) -> None:
        if up == self._up.is_set():
            return
        (self._up.set if up else self._up.clear)()
        self._on_state(up)

    async def attach(self, subjects: tuple[str, ...], receiver: Receiver, *, queue: str = "") -> object:
        """Subscribes; frames of the subjects, which must not overlap, go to `receiver` from then on, in the order in
        which they come. Returns a handle for `move` and `detach`.

        Raises:
            NatsUnavailable: nats-py refuses the subscription.
        """
        attachment = _Attachment(subjects, queue, receiver)
        self._attachments.append(attachment)
        if self._client is not None and not self._client.is_closed:
            try:
                await self._subscribe(attachment)
                await self.flush()
            except (ConnectionClosedError, NatsUnavailable):
                pass  # a lost server gets the request again when it is connected
            except (NatsError, OSError) as error:
                self._attachments.remove(attachment)
                raise NatsUnavailable(
                    f"cannot subscribe to {', '.join(subjects)} at {self.shown_url}: {error}", url=self.shown_url
                ) from error
        return attachment

    async def move(self, handle: object, subjects: tuple[str, ...]) -> None:
        """The attachment's receiver gets other subjects. Subscriptions of subjects that stay are not touched; the
        others are exchanged in one write.
        """
        assert isinstance(handle, _Attachment)
        handle.subjects = subjects
        client, demux = self._client, self._demux
        if client is None or demux is None or client.is_closed or handle.subscribed_by is not client:
            return
        leaving = [sid for subject, sid in handle.sids.items() if subject not in subjects]
        handle.sids = {subject: sid for subject, sid in handle.sids.items() if subject in subjects}
        _forget(client, leaving)
        with contextlib.suppress(NatsError, OSError, NatsUnavailable):  # a lost server gets it again on reconnect
            for sid in leaving:
                await client._send_unsubscribe(sid)
            await self._subscribe(handle)
            await self.flush()

    def redirect(self, handle: object, receiver: Receiver) -> None:
        """All frames of the attachment that have not been received yet go to this receiver, without a gap."""
        assert isinstance(handle, _Attachment)
        handle.receiver = receiver
        if self._demux is not None and handle.group and handle.subscribed_by is self._client:
            self._demux.receivers[handle.group] = receiver

    async def _subscribe(self, attachment: _Attachment) -> None:
        client, demux = self._client, self._demux
        assert client is not None
        assert demux is not None
        if attachment.subscribed_by is not client:
            attachment.subscribed_by, attachment.sids, attachment.group = client, {}, 0
        for subject in attachment.subjects:
            if subject in attachment.sids:
                continue  # twice on one connection would store every message twice
            attachment.sids[subject] = 0
            sid = (await client.subscribe(subject, queue=attachment.queue))._id
            attachment.sids[subject] = sid
            attachment.group = attachment.group or sid
            demux.receivers[attachment.group] = attachment.receiver
            demux.join(sid, attachment.group)

    async def detach(self, handle: object) -> None:
        """Unsubscribes; messages that the server had already sent are still received until it has answered."""
        assert isinstance(handle, _Attachment)
        self._attachments.remove(handle)
        client, demux = self._client, self._demux
        if client is None or demux is None or client.is_closed or handle.subscribed_by is not client:
            return
        was_reachable = self.is_reachable
        _forget(client, handle.sids.values())
        with contextlib.suppress(NatsError, OSError, NatsUnavailable):  # a lost connection has no subscriptions
            for sid in handle.sids.values():
                await client._send_unsubscribe(sid)
            if was_reachable:
                await self.flush()
        demux.receivers.pop(handle.group, None)
        if not was_reachable:
            demux.receivers[handle.group] = _ignored  # messages that it sent meanwhile may still arrive

    @property
    def unsent_bytes(self) -> int:
        """Of sent protocol, what the server has not accepted yet."""
        transport = None if self._client is None else self._client._transport
        return transport.unsent_bytes if isinstance(transport, InPlaceTransport) else 0

    def send_now(self, protocol: bytes | memoryview) -> bool:
        """Sends raw protocol; False (and nothing is sent) while no server is connected, or if the server accepts no
        more data and too much is waiting for it.
        """
        client = self._client
        if client is None or not client.is_connected:
            return False
        transport = client._transport
        if isinstance(transport, InPlaceTransport):
            if transport.unsent_bytes > _PENDING_BYTES:
                return False
            transport.write(protocol)  # type: ignore[no-untyped-call]
        else:  # a websocket sends nothing before nats-py drains it
            client._pending.append(bytes(protocol))
            client._pending_data_size += len(protocol)
            assert client._flush_queue is not None, "made when nats-py connected"
            client._flush_queue.put_nowait(asyncio.get_running_loop().create_future())
        return True

    async def send(self, protocol: bytes | memoryview) -> bool:
        """The same, and waits if the server accepts less than is sent."""
        client = self._client
        if not self.send_now(protocol):
            return False
        with contextlib.suppress(OSError):  # the next one is notified
            assert client is not None, "something was sent"
            assert client._transport is not None, "something was sent"
            await client._transport.drain()  # type: ignore[no-untyped-call]
        return True

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Returns when the server has processed everything that was sent.

        nats-py's own `flush` writes its PING immediately, before waiting data; therefore waiting data is written first.

        Raises:
            NatsUnavailable: the server did not confirm in time.
        """
        client, cancellations = self._client, _cancellations()
        try:
            if client is None or not client.is_connected:
                raise NatsError("not connected")
            async with asyncio.timeout(timeout_s):
                await client._flush_pending(force_flush=True)
                await client.flush(timeout=max(1, int(timeout_s)))
                if _cancellations() > cancellations:  # which `asyncio.wait_for` has lost
                    raise asyncio.CancelledError
        except (TimeoutError, NatsError, OSError) as error:
            raise NatsUnavailable(
                f"NATS at {self.shown_url} did not confirm in time ({str(error) or 'no answer'}): what was sent last "
                "may not have arrived",
                url=self.shown_url,
            ) from error

    async def close(self) -> None:
        """Closes the connection; sent data is flushed first if a server is connected."""
        if self._supervisor is not None:
            while not self._supervisor.done():  # before Python 3.12, `asyncio.wait_for` may lose a cancellation
                self._supervisor.cancel()
                await asyncio.wait([self._supervisor], timeout=_RETRY_S)
        client = self._client
        if client is None or client.is_closed:
            return
        while client.is_connected:
            transport = client._transport
            unsent_bytes = transport.unsent_bytes if isinstance(transport, InPlaceTransport) else 0
            try:
                await self.flush()
                break
            except NatsUnavailable:  # closing: no callback is needed any more
                if not isinstance(transport, InPlaceTransport):
                    break
                if transport.unsent_bytes >= unsent_bytes:  # it accepts no more data
                    transport.abort()  # else nats-py waits until everything is sent
                    break
        with contextlib.suppress(OSError, NatsError):  # aborted
            await client.close()
        await _end_reconnecting(client)
