"""The client of nats-py, with credentials that are read for each connection; and why a connection fails.

Invariant. Where TLS was asked for (files, handshake first, or a URL that begins with tls:// or wss://), nothing is sent
to a server without TLS: nats-py alone would send credentials in plain text if the server, or an attacker on the
network, says that TLS is not required.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, NamedTuple

from nats.aio.client import Client, RawCredentials

from natslog.errors import ConfigError
from natslog.wire.credentials import Login, NatsCredentials
from natslog.wire.transport import InPlaceTransport, UnusableConnection

_LOGIN_WORDS = ("authorization", "authentication", "credentials", "nkey", "seed")
"""What the texts of servers and nats-py have in common where a login failed."""


class NatsClient(Client):
    """nats-py with credentials that are read for each connection, and that are not sent without TLS where TLS was
    asked for.
    """

    def __init__(self, credentials: NatsCredentials) -> None:
        super().__init__()
        self._credentials = credentials

    @property
    def ssl_context(self) -> ssl.SSLContext:
        try:
            return self._credentials.tls_context()
        except ConfigError as error:
            raise UnusableConnection(error.message) from error

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if self._wants_tls() and info.get("tls_available"):
            info["tls_required"] = True  # nats-py uses TLS only where the server requires it
        await super()._process_info(info, initial_connection)

    def _connect_command(self) -> bytes:
        if self._wants_tls() and not self._has_tls():
            raise UnusableConnection(
                "the server does not offer TLS, so no credentials were sent", "turn TLS on there, or correct the URL"
            )
        try:
            login = self._credentials.login()
        except ConfigError as error:
            raise UnusableConnection(error.message) from error
        self.options |= {"user": login.user, "password": login.password, "token": login.token}
        self._auth_configured |= login != Login()
        if login.credentials is not None or login.nkey_seed is not None:
            self._user_credentials = None if login.credentials is None else RawCredentials(login.credentials)
            self._nkeys_seed_str = login.nkey_seed
            self._setup_nkeys_connect()
        return super()._connect_command()

    def _wants_tls(self) -> bool:
        return self._credentials.wants_tls or (
            self._current_server is not None and self._current_server.uri.scheme in ("tls", "wss")
        )

    def _has_tls(self) -> bool:
        if isinstance(self._transport, InPlaceTransport):
            return self._transport.has_tls
        return self._current_server is not None and self._current_server.uri.scheme == "wss"

    async def _process_pong(self) -> None:
        """nats-py ends its reading task, and nothing else, where a PONG comes for a `flush` whose time was up: the
        connection would go on without an answer to the server's PING, and without noticing its own end.
        """
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()


class Problem(NamedTuple):
    """Why there is no connection. `remedy`: what to correct; empty if the server may just not run, or if the text is
    complete.
    """

    text: str
    remedy: str = ""
    is_login: bool = False
    is_complete: bool = False

    @property
    def shown(self) -> str:
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


def problem_of(error: BaseException, credentials: NatsCredentials) -> Problem:
    if isinstance(error, UnusableConnection):
        return Problem(str(error), error.remedy, is_complete=True)
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"the certificate of the server is not accepted, {error.verify_message.rstrip('.')}"
        return Problem(text, credentials.ca_remedy)
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if "alert" in reason:  # what the server sends when it refuses
            return Problem(f"the server ended the TLS handshake, {reason}", credentials.certificate_remedy)
        remedy = "check that the URL is of a NATS server with TLS"
        if credentials.tls_handshake_first:
            remedy = "if the server does not begin with the handshake, remove handshake first"
        return Problem(f"the TLS handshake failed, {reason}", remedy)
    text = str(error) or type(error).__name__
    if isinstance(error, AttributeError) and "_over_ssl" in text:  # of asyncio, where the connection is closed already
        return Problem("the server closed the connection after the TLS handshake", credentials.certificate_remedy)
    if any(word in text.lower() for word in _LOGIN_WORDS):
        return Problem(text, credentials.login_remedy, is_login=True)
    if "expecting INFO" in text and not credentials.tls_handshake_first:
        return Problem(text, "if the server begins with the TLS handshake, set handshake first")
    return Problem(text)
