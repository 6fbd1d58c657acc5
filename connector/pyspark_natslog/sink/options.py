"""Options of the sink: where rows go, when they count as written, and what happens to rows that cannot be sent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from natslog.config import DEFAULT_NATS_URL
from natslog.errors import ConfigError
from natslog.model import MAX_IN_FLIGHT, Ack
from natslog.subjects import check_subject
from pyspark_natslog.options import CONNECTION, Given, naming, refuse

_CREDENTIALS = {
    "natsCredsFile": "creds_file",
    "natsUser": "user",
    "natsPasswordFile": "password_file",
    "natsTokenFile": "token_file",
    "natsTlsCaFile": "tls_ca_file",
    "natsTlsCertFile": "tls_cert_file",
    "natsTlsKeyFile": "tls_key_file",
}
NATS_ONLY = (
    "natsServers", "ack", "msgIdColumn", "maxInFlight", "ackTimeout", "onError", "deadLetterSubject", *_CREDENTIALS,
)  # fmt: skip
_SINK = ("path", "subject", *NATS_ONLY)
_HTTP_ONLY = ("servers", "stream", *CONNECTION)


def goes_over_http(options: Mapping[str, str]) -> bool:
    """Whether rows are appended to a stream. Raises ConfigError: `path` is neither `nats` nor `http`."""
    path = Given({name: value for name, value in options.items() if name.lower() == "path"}, ("path",))
    return path.one_of("path", "nats", ("nats", "http")) == "http"


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The checked options; files are read where they are used.

    Attributes:
        dead_letter_subject: the subject for rows that cannot be sent; None: they fail the write.
        credentials: arguments for `NatsCredentials`.
    """

    nats_url: str = field(repr=False)
    subject: str | None
    ack: Ack
    message_id_column: str | None
    max_in_flight: int
    ack_timeout_s: float
    dead_letter_subject: str | None
    credentials: Mapping[str, str | None]

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Checked options.

        Raises:
            ConfigError: unknown (the nearest known one is named), wrong or clashing.
        """
        why = 'is for rows that are appended to a stream over HTTP: add .option("path", "http"), or remove it'
        refuse(options, _HTTP_ONLY, why)
        given = Given(options, _SINK)
        return cls(
            nats_url=given.text("natsServers") or os.environ.get("NATS_URL") or DEFAULT_NATS_URL,
            subject=_subject(given, "subject"),
            ack=cast(Ack, given.one_of("ack", "flush", ("none", "flush", "stored"))),
            message_id_column=given.text("msgIdColumn"),
            max_in_flight=given.whole("maxInFlight", MAX_IN_FLIGHT) or MAX_IN_FLIGHT,
            ack_timeout_s=given.seconds("ackTimeout", 30.0),
            dead_letter_subject=_dead_letter_subject(given),
            credentials=_credentials(given),
        )


def _subject(given: Given, name: str) -> str | None:
    subject = given.text(name)
    if subject is not None:
        with naming(name):
            check_subject(subject, wildcards=False)
    return subject


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


def _credentials(given: Given) -> dict[str, str | None]:
    if given.has("natsTlsKeyFile") and not given.has("natsTlsCertFile"):
        raise ConfigError("option natsTlsKeyFile requires natsTlsCertFile: set both", option="natsTlsKeyFile")
    return {argument: given.text(name) for name, argument in _CREDENTIALS.items()}
