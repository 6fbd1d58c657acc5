"""Options of the sink: where rows go, when they count as written, and what happens to rows that cannot be sent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from natslog.client import ClientOptions, NatslogClient, parse_servers
from natslog.config import DEFAULT_NATS_URL
from natslog.errors import ConfigError
from natslog.model import MAX_IN_FLIGHT, ONE_OFF_PRODUCERS, Ack
from natslog.subjects import check_name, check_subject
from natslog.wire.credentials import NatsCredentials
from pyspark_natslog.options import CONNECTION, Given, client_options, naming, refuse

_CREDENTIALS = {
    "natsCredsFile": "creds_file",
    "natsNkeyFile": "nkey_file",
    "natsUser": "user",
    "natsUserFile": "user_file",
    "natsPasswordFile": "password_file",
    "natsTokenFile": "token_file",
    "natsTlsCaFile": "tls_ca_file",
    "natsTlsCertFile": "tls_cert_file",
    "natsTlsKeyFile": "tls_key_file",
}
NATS_ONLY = (
    "natsServers", "ack", "ackStreams", "msgIdColumn", "maxInFlight", "ackTimeout", "onError", "deadLetterSubject",
    "envelope", "natsTlsHandshakeFirst", *_CREDENTIALS,
)  # fmt: skip
TRANSACTION = ("txnAppId", "txnVersion")
SINK_OPTIONS = ("path", "subject", "servers", "tombstones", *TRANSACTION, *NATS_ONLY, *CONNECTION)
JVM_ONLY = ("exactlyOnce",)
_HTTP_ONLY = ("stream", "onConflict")


def goes_over_http(options: Mapping[str, str]) -> bool:
    """Whether rows are appended to a stream. Raises ConfigError: `path` is neither `nats` nor `http`."""
    path = Given({name: value for name, value in options.items() if name.lower() == "path"}, ("path",))
    return path.one_of("path", "nats", ("nats", "http")) == "http"


@dataclass(frozen=True, slots=True)
class Transaction:
    """What names a batch write, as for Delta tables: a repetition of it has the same ones."""

    app_id: str
    version: int

    @classmethod
    def parse(cls, given: Given) -> Transaction | None:
        """Raises ConfigError: one of the two is missing or wrong."""
        app_id, version = given.text("txnAppId"), given.whole("txnVersion", None, low=0)
        if app_id is None and version is None:
            return None
        if app_id is None or version is None:
            missing = "txnAppId" if app_id is None else "txnVersion"
            raise ConfigError(f"options txnAppId and txnVersion belong together: set {missing} too", option=missing)
        with naming("txnAppId"):
            check_name(app_id, "application")
        if app_id.startswith(ONE_OFF_PRODUCERS):
            raise ConfigError(
                f"option txnAppId must not begin with {ONE_OFF_PRODUCERS!r}, as writes without it do", option="txnAppId"
            )
        return cls(app_id, version)


def refuse_transaction(transaction: Transaction | None) -> None:
    """Raises ConfigError, for a streaming query."""
    if transaction is not None:
        raise ConfigError(
            "options txnAppId and txnVersion are for batch writes (df.write), as in foreachBatch; a streaming query "
            "numbers its batches itself: remove them",
            option="txnAppId",
        )


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The checked options; files are read where they are used.

    Attributes:
        servers, client_options: of the brokers that are asked which streams record a subject.
        ack: None: `stored` for the subjects that streams record and ack, `flush` for others.
        ack_streams: each of these streams has to ack each row.
        asks_brokers: whether they are asked which streams record the subjects of rows, and how these ack.
        envelope: whether rows are sent together where a stream stores them.
        tombstones: whether a row with a key and a null value is a tombstone.
        dead_letter_subject: the subject for rows that cannot be sent; None: they fail the write.
    """

    nats_url: str = field(repr=False)
    servers: tuple[str, ...] = field(repr=False)
    client_options: ClientOptions
    subject: str | None
    ack: Ack | None
    ack_streams: tuple[str, ...]
    asks_brokers: bool
    message_id_column: str | None
    max_in_flight: int
    ack_timeout_s: float
    dead_letter_subject: str | None
    envelope: bool
    tombstones: bool
    transaction: Transaction | None
    credentials: NatsCredentials

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Checked options.

        Raises:
            ConfigError: unknown (the nearest known one is named), wrong or clashing.
        """
        why = 'is for rows that are appended to a stream over HTTP: add .option("path", "http"), or remove it'
        refuse(options, _HTTP_ONLY, why)
        given = Given(options, SINK_OPTIONS)
        with naming("servers"):
            servers = parse_servers(given.text("servers"))
        ack = cast(Ack, given.one_of("ack", "stored", ("none", "flush", "stored"))) if given.text("ack") else None
        return cls(
            nats_url=given.text("natsServers") or os.environ.get("NATS_URL") or DEFAULT_NATS_URL,
            servers=servers,
            client_options=client_options(given),
            subject=_subject(given, "subject"),
            ack=ack,
            ack_streams=_ack_streams(given, ack),
            asks_brokers=ack is None
            or (ack == "stored" and any(map(given.has, ("servers", "ackStreams", "envelope")))),
            message_id_column=given.text("msgIdColumn"),
            max_in_flight=given.whole("maxInFlight", MAX_IN_FLIGHT) or MAX_IN_FLIGHT,
            ack_timeout_s=given.seconds("ackTimeout", 30.0),
            dead_letter_subject=_dead_letter_subject(given),
            envelope=_envelope(given, ack),
            tombstones=given.flag("tombstones", False),
            transaction=_transaction(given),
            credentials=_credentials(given),
        )

    def client(self) -> NatslogClient:
        return NatslogClient(self.servers, self.client_options)


def _subject(given: Given, name: str) -> str | None:
    subject = given.text(name)
    if subject is not None:
        with naming(name):
            check_subject(subject, wildcards=False)
    return subject


def _ack_streams(given: Given, ack: Ack | None) -> tuple[str, ...]:
    text = given.text("ackStreams")
    if text is None:
        return ()
    if given.text("deadLetterSubject") is not None:
        raise ConfigError(
            "option ackStreams cannot be combined with deadLetterSubject: the named streams would have to ack the dead "
            "letters as well: remove one of the two",
            option="ackStreams",
        )
    if ack in ("none", "flush"):
        raise ConfigError(f'option ackStreams requires ack "stored", not {ack!r}: remove one of the two', option="ack")
    streams = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    with naming("ackStreams"):
        for name in streams:
            check_name(name)
    if not streams:
        raise ConfigError('option ackStreams names no stream: write "orders" or "orders,audit"', option="ackStreams")
    return streams


def _envelope(given: Given, ack: Ack | None) -> bool:
    envelope = given.flag("envelope", False)
    if envelope and ack in ("none", "flush"):
        raise ConfigError(
            f'option envelope requires ack "stored", not {ack!r}: only streams read envelopes: remove one of the two',
            option="envelope",
        )
    return envelope


def _dead_letter_subject(given: Given) -> str | None:
    subject = _subject(given, "deadLetterSubject")
    on_error = given.one_of("onError", "fail", ("fail", "deadletter"))
    if on_error == "deadletter" and subject is None:
        raise ConfigError(
            'option onError "deadletter" requires .option("deadLetterSubject", "orders.rejected")', option="onError"
        )
    if on_error == "fail" and subject is not None:
        raise ConfigError(
            'option deadLetterSubject requires .option("onError", "deadletter")', option="deadLetterSubject"
        )
    return subject


def _transaction(given: Given) -> Transaction | None:
    transaction = Transaction.parse(given)
    if transaction is not None and given.has("msgIdColumn"):
        raise ConfigError(
            "options txnAppId and msgIdColumn clash: message ids come from one of them: remove the other",
            option="txnAppId",
        )
    return transaction


def _credentials(given: Given) -> NatsCredentials:
    if given.has("natsTlsKeyFile") and not given.has("natsTlsCertFile"):
        raise ConfigError("option natsTlsKeyFile requires natsTlsCertFile: set both", option="natsTlsKeyFile")
    files: dict[str, Any] = {argument: given.text(name) for name, argument in _CREDENTIALS.items()}
    return NatsCredentials(**files, tls_handshake_first=given.flag("natsTlsHandshakeFirst", False))
