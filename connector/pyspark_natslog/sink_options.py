"""What the sink is told: where rows go, and when they count as written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from natslog.model import MAX_IN_FLIGHT, Ack
from natslog.subjects import check_subject
from pyspark_natslog.options import Given, naming

_SINK = (
    "natsServers", "subject", "ack", "msgIdColumn", "maxInFlight", "ackTimeout", "natsCredsFile", "natsUser",
    "natsPasswordFile",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """What the sink was told; files are read where they are used."""

    nats_url: str | None
    subject: str | None
    ack: Ack
    message_id_column: str | None
    max_in_flight: int
    ack_timeout_s: float
    creds_file: str | None
    user: str | None
    password_file: str | None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Checked options.

        Raises:
            ConfigError: unknown (the nearest known one is named) or wrong.
        """
        given = Given(options, _SINK)
        subject, ack = given.text("subject"), given.one_of("ack", "flush", ("none", "flush", "stored"))
        if subject is not None:
            with naming("subject"):
                check_subject(subject, wildcards=False)
        return cls(
            nats_url=given.text("natsServers"),
            subject=subject,
            ack=cast(Ack, ack),
            message_id_column=given.text("msgIdColumn"),
            max_in_flight=given.whole("maxInFlight", MAX_IN_FLIGHT) or MAX_IN_FLIGHT,
            ack_timeout_s=given.seconds("ackTimeout", 30.0),
            creds_file=given.text("natsCredsFile"),
            user=given.text("natsUser"),
            password_file=given.text("natsPasswordFile"),
        )
