"""The second connection of a broker to NATS, as a leafnode: it sends messages with any subject and reply subject, and
the server states which subjects have subscribers.

Theory of operation. A leafnode is a server that is connected to another one; natslog is one that subscribes to nothing.
A message is sent as one of these, each followed by header, payload and CR LF; sizes are in bytes, and the second one of
`HMSG` is that of header and payload:

    LMSG <subject> [reply] <size>                       HMSG <subject> [reply] <header size> <size>
    LMSG <subject> + <reply> <group …> <size>           HMSG <subject> + <reply> <group …> <header size> <size>
    LMSG <subject> | <group …> <size>                   HMSG <subject> | <group …> <header size> <size>

All forms reach plain subscribers. The first line does not reach members of queue groups. The others reach one member of
each group that is named (`Interest.groups`), and plain subscribers as well: a message is sent once. If the reply is
`$JS.ACK.<seven tokens>@<text>`, a subscriber receives `<text>` as the subject, and the reply without `@<text>`.

A connection is up when the server has answered a PING that was sent with `CONNECT`. It sends all existing interest
before, so that `interest` is complete from the first moment.

Invariant: while the link is up, `interest` is what the server has stated on this connection. It is empty when the link
was lost or closed, and incomplete while it connects.

Source: leafnode.go and client.go (`processMsgResults`) of nats-server 2.15.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import time
from collections.abc import Callable

from natslog.errors import ConfigError
from natslog.log_events import event
from natslog.urls import without_secrets
from natslog.wire.credentials import NatsCredentials
from natslog.wire.interest import Interest
from natslog.wire.leaf_connection import LeafConnection, LeafRefused
from natslog.wire.leaf_protocol import LeafAddress, LeafProtocolError, addresses_in, connect_line
from natslog.wire.nats_client import Problem, problem_of
from natslog.wire.transport import UnusableConnection

__all__ = ["LeafLink"]

logger = logging.getLogger("natslog.nats")

_RETRY_S = 0.25
_CONNECT_TIMEOUT_S = 3
_PENDING_BYTES = 64 * 1024 * 1024
_PING_EVERY_S = 1
_SILENT_PINGS = 60  # as many seconds, so that data that waits on a slow network was sent before
_UNREACHABLE_S = 2.5
_DEFAULT_PAYLOAD_BYTES = 1024 * 1024


class _ClosedAfterTls(ConnectionResetError):
    """By the server, without an error: most often it does not accept the certificate of this broker."""


class LeafLink:
    """One leafnode connection, kept up until `close`.

    Args:
        urls: one or more URLs of leafnode listeners, comma-separated (`nats-leaf://`, `nats://`, `tls://`; port 7422 if
            there is none); tried in turn.
        name: shown in the server's list of leafnodes.
        on_state: called with True when a connection is up, and with False when it is lost; not by `close`.
        on_interest: called with a subject, which may have wildcards, when the interest in it has begun or ended, after
            `interest` was changed. Not called for what exists before `on_state(True)`, or ends by `on_state(False)`.

    Attributes:
        interest: which subjects have subscribers; to be used while the link is up.
        connections: how often one was made; if it has not changed, no sent data was lost. shown_url: the URLs without
        user and password. problem: why there is no connection, for a person; empty while it is up, or not yet tried.

    Raises:
        ConfigError: the URLs cannot be used.
    """

    def __init__(
        self,
        urls: str,
        *,
        name: str,
        credentials: NatsCredentials = NatsCredentials(),
        on_state: Callable[[bool], None] | None = None,
        on_interest: Callable[[str], None] | None = None,
    ) -> None:
        self._addresses = addresses_in(urls)
        self._name = name
        self._server_id = secrets.token_hex(11).upper()
        self._credentials = credentials
        self.on_state = on_state or (lambda up: None)
        self._connection: LeafConnection | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._problems: dict[LeafAddress, Problem] = {}
        self._max_payload_bytes = _DEFAULT_PAYLOAD_BYTES
        self.on_interest: Callable[[str], None] = on_interest or (lambda subject: None)
        self.interest = Interest()
        self.connections = 0
        self.shown_url = without_secrets(urls)

    # ---- its state ----

    @property
    def is_up(self) -> bool:
        return self._connection is not None and not self._connection.has_ended

    @property
    def is_reachable(self) -> bool:
        """Whether the server, which gets a PING once a second, has sent anything recently."""
        connection = self._connection
        return (
            connection is not None
            and not connection.has_ended
            and time.monotonic() - connection.last_received_s < _UNREACHABLE_S
        )

    @property
    def problem(self) -> str:
        if len(self._addresses) == 1:
            return "".join(problem.shown for problem in self._problems.values())
        return "; ".join(f"{address.shown}: {problem.shown}" for address, problem in self._problems.items())

    @property
    def max_payload_bytes(self) -> int:
        """The server's limit for header and payload of a message; 1 MiB until a server was connected. A larger message
        ends the connection.
        """
        return self._max_payload_bytes

    @property
    def unsent_bytes(self) -> int:
        """Sent here, and not yet taken by the kernel."""
        return 0 if self._connection is None else self._connection.unsent_bytes

    @property
    def written_bytes(self) -> int:
        """Sent here on the present connection, whether or not the kernel has taken it."""
        return 0 if self._connection is None else self._connection.written_bytes

    @property
    def is_writable(self) -> bool:
        """Whether it is up, and `drain` would not wait."""
        return self._connection is not None and self._connection.is_writable

    def may_send(self, subject: str) -> bool:
        """Whether the permissions of the NATS user let this link send to the subject; False while it is down. The
        server ends the connection that sends to another one.
        """
        return self._connection is not None and self._connection.permissions.permit(subject)

    # ---- sending ----

    def send_now(self, protocol: bytes | memoryview) -> bool:
        """Sends raw protocol, which must not be changed afterwards; False (and nothing is sent) while no server is
        connected, or if more than 64 MiB are unsent.
        """
        connection = self._connection
        if connection is None or connection.has_ended or connection.unsent_bytes > _PENDING_BYTES:
            return False
        connection.write(protocol)
        return True

    async def drain(self) -> None:
        """Waits while more than 1 MiB is unsent, because the server accepts less than is sent. Returns if the
        connection is lost.
        """
        if self._connection is not None:
            await self._connection.drain()

    def drop_unreceived(self) -> None:
        """Ends the connection if the server does not answer, so that what was sent does not arrive when it does."""
        if self._connection is not None and not self.is_reachable:
            self._connection.fail(ConnectionAbortedError("the server did not answer, and another broker delivers now"))

    async def quiesced(self, timeout_s: float = 2.0) -> bool:
        """Whether the server has answered a PING that was sent after this call: all interest that it had stated before
        is in `interest`. False: the link is down, or there was no answer in time.
        """
        if not self.is_up:
            return False
        assert self._connection is not None, "it is up"
        answer = self._connection.ping()
        await asyncio.wait([answer], timeout=timeout_s)
        return answer.done() and answer.result()

    # ---- life ----

    async def open(self) -> None:
        """Starts connecting; returns at once, whether or not a server is there.

        Raises:
            ConfigError: the credentials cannot be read.
        """
        self._credentials.check()
        self._supervisor = asyncio.create_task(self._supervise(), name="nats-leaf")

    async def close(self) -> None:
        """Closes the connection; sent data is flushed first if a server is connected and accepts it."""
        if self._supervisor is not None:
            while not self._supervisor.done():  # before Python 3.12, `asyncio.wait_for` may lose a cancellation
                self._supervisor.cancel()
                await asyncio.wait([self._supervisor], timeout=_RETRY_S)
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        self.interest.clear()

    async def _supervise(self) -> None:
        """Connects, and connects again when the connection is lost."""
        attempts = 0
        while True:
            address = self._addresses[attempts % len(self._addresses)]
            attempts += 1
            try:
                connection = await self._connect(address)
            except Exception as error:  # files, nkeys, names, sockets, TLS; the next attempt may succeed
                self._note_error(address, error)
            else:
                self._begin(address, connection)
                await self._keep_up(connection)
                self._end(address, connection)
            self.interest.clear()
            await asyncio.sleep(_RETRY_S)

    def _begin(self, address: LeafAddress, connection: LeafConnection) -> None:
        self._connection = connection
        self._max_payload_bytes = connection.info.max_payload
        self.connections += 1
        self._problems.clear()
        what = ("the leafnode connection to NATS at %s is up", address.shown)
        if self.connections == 1:
            logger.info(*what, extra=event("nats_leaf.connected", address=address.shown))
        else:
            logger.warning(*what, extra=event("nats_leaf.reconnected", address=address.shown))
        self.on_state(True)

    async def _keep_up(self, connection: LeafConnection) -> None:
        """Until it has ended."""
        silent = 0
        while not connection.ended.done():
            received = connection.received
            connection.ping()
            await asyncio.wait([connection.ended], timeout=_PING_EVERY_S)
            silent = 0 if connection.received != received else silent + 1
            if silent >= _SILENT_PINGS:
                connection.fail(ConnectionAbortedError(f"the server sent nothing for {silent * _PING_EVERY_S} s"))

    def _end(self, address: LeafAddress, connection: LeafConnection) -> None:
        self._connection = None
        self.interest.clear()
        problem = self._problems[address] = self._problem_of(connection.ended.result())
        logger.warning(
            f"the leafnode connection to NATS at {address.shown} was lost: {problem.shown}; reconnecting",
            extra=event("nats_leaf_down", address=address.shown),
        )
        self.on_state(False)

    def _interest_changed(self, connection: LeafConnection, subject: str) -> None:
        if connection is self._connection:
            self.on_interest(subject)

    # ---- connecting ----

    async def _connect(self, address: LeafAddress) -> LeafConnection:
        """A connection that has received all existing interest."""
        self.interest.clear()
        connection = LeafConnection(self.interest, lambda subject: self._interest_changed(connection, subject))
        try:
            await self._reach(connection, address)
            await self._log_in(connection, address)
        except BaseException:
            connection.fail(ConnectionAbortedError("closed here"))
            raise
        return connection

    async def _reach(self, connection: LeafConnection, address: LeafAddress) -> None:
        """Until the server has sent its INFO and, where it is wanted or required, TLS is established."""
        loop = asyncio.get_running_loop()
        wants_tls = self._credentials.wants_tls or address.wants_tls
        tls: dict[str, object] = {}
        if self._credentials.tls_handshake_first:
            tls = {"ssl": self._credentials.tls_context(), "server_hostname": address.host}
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await loop.create_connection(lambda: connection, address.host, address.port, **tls)  # type: ignore[call-overload]
        await asyncio.wait([connection.info_received], timeout=_CONNECT_TIMEOUT_S)
        self._check_info(connection)
        if connection.has_tls:
            return
        if connection.info.tls_required or (wants_tls and connection.info.tls_available):
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await connection.start_tls(self._credentials.tls_context(), address.host)
        elif wants_tls:
            raise UnusableConnection(
                "the server does not offer TLS to leafnodes, so no credentials were sent",
                "turn TLS on in its leafnodes block, or correct the URL",
            )

    def _check_info(self, connection: LeafConnection) -> None:
        """Raises the reason for which there is none that can be used."""
        if connection.ended.done() and not isinstance(reason := connection.ended.result(), ConnectionResetError):
            raise reason
        if not (connection.info_received.done() and connection.info_received.result()):
            remedy = "" if connection.has_tls else "if the server begins with the TLS handshake, set handshake first; "
            raise UnusableConnection(
                "the server sent no INFO", f"{remedy}otherwise use the port of its leafnodes block in the URL"
            )
        if not connection.info.is_of_leaf_port:
            raise UnusableConnection(
                "this is a port for clients or for servers of its cluster, not one for leafnodes",
                "use the port of the leafnodes block of the NATS server in the URL",
            )

    async def _log_in(self, connection: LeafConnection, address: LeafAddress) -> None:
        """Until the server has accepted the login and sent all existing interest, which may take long."""
        login = self._credentials.login()
        connection.write(connect_line(connection.info, address, login, name=self._name, server_id=self._server_id))
        answer = connection.ping()
        while not answer.done():
            received = connection.received
            await asyncio.wait([answer], timeout=_CONNECT_TIMEOUT_S)
            if not answer.done() and connection.received == received:
                raise UnusableConnection(f"the server did not answer within {_CONNECT_TIMEOUT_S} s")
        if answer.result():
            return
        await asyncio.wait([connection.ended])  # awaiting it would cancel it with this task
        reason = connection.ended.result()
        if connection.has_tls and isinstance(reason, ConnectionResetError):
            raise _ClosedAfterTls("the server closed the connection after the TLS handshake")
        raise reason

    # ---- problems ----

    def _note_error(self, address: LeafAddress, error: Exception) -> None:
        known = self._problems.get(address)
        was_reset = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
        if was_reset and known is not None and known.remedy:
            return  # a server that refuses a leafnode may reset the connection before its error was read
        problem = self._problem_of(error)
        if known is None or (problem.remedy or problem) != (known.remedy or known):
            logger.warning(
                f"no leafnode connection to NATS at {address.shown}: {problem.shown}; trying again",
                extra=event("nats_leaf_down", address=address.shown),
            )
        self._problems[address] = problem

    def _problem_of(self, error: Exception) -> Problem:
        if isinstance(error, ConfigError):
            return Problem(error.message, is_complete=True)
        if isinstance(error, _ClosedAfterTls):
            return Problem(str(error), self._credentials.certificate_remedy)
        if isinstance(error, TimeoutError):
            return Problem("no answer", "correct the URL, or look for what drops packets to this port")
        if isinstance(error, LeafProtocolError):
            return Problem(str(error), "use the port of the leafnodes block of the NATS server in the URL")
        if isinstance(error, OSError) and f"[Errno {errno.ECONNREFUSED}]" in str(error):
            return Problem(
                "nothing listens there",
                "start the NATS server with a leafnodes block (leafnodes { port: 7422 }), or correct the URL",
            )
        if isinstance(error, LeafRefused) and "permissions violation" in str(error).lower():
            return Problem(str(error), "permit the NATS user of the leafnode to publish to this subject")
        return problem_of(error, self._credentials)
