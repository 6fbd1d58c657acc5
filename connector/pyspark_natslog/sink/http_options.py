"""Options of the sink that appends rows to a stream over HTTP (`path=http`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from natslog.client import ClientOptions, NatslogClient, parse_servers
from natslog.errors import ConfigError
from natslog.model import OnConflict, subjects_of
from natslog.subjects import check_name, check_subject, has_wildcard
from pyspark_natslog.options import CONNECTION, Given, client_options, naming, refuse
from pyspark_natslog.sink.options import NATS_ONLY, TRANSACTION, Transaction

HTTP_OPTIONS = ("path", "servers", "stream", "subject", "onConflict", "tombstones", *TRANSACTION, *CONNECTION)


@dataclass(frozen=True, slots=True)
class HttpSinkOptions:
    """`subject`: of all rows; None: the column `subject`, or else the stream's own subject. `on_conflict`: what becomes
    of a batch that was stored with other rows, or before others (`NatslogClient.commit_append`). `tombstones`: a row
    with a key and a null value is a tombstone. `transaction`: by it, a repetition of the
    write is found.
    """

    servers: tuple[str, ...] = field(repr=False)
    stream: str
    subject: str | None
    client_options: ClientOptions
    on_conflict: OnConflict = "fail"
    tombstones: bool = False
    transaction: Transaction | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> HttpSinkOptions:
        """Checked options.

        Raises:
            ConfigError: unknown (the nearest known one is named), wrong, or of the other path.
        """
        why = "is for rows that are published to NATS, and path=http appends rows to the stream: remove one of the two"
        refuse(options, NATS_ONLY, why)
        given = Given(options, HTTP_OPTIONS)
        stream, subject = given.text("stream"), given.text("subject")
        if stream is None:
            raise ConfigError(
                'option stream is missing: path=http requires the stream to append to, .option("stream", "orders")',
                option="stream",
            )
        with naming("stream"):
            check_name(stream)
        if subject is not None:
            with naming("subject"):
                check_subject(subject, wildcards=False)
        with naming("servers"):
            servers = parse_servers(given.text("servers"))
        on_conflict = cast(OnConflict, given.one_of("onConflict", "fail", ("fail", "skip", "append")))
        tombstones = given.flag("tombstones", False)
        transaction = Transaction.parse(given)
        return cls(servers, stream, subject, client_options(given), on_conflict, tombstones, transaction)

    def client(self) -> NatslogClient:
        return NatslogClient(self.servers, self.client_options)

    def check_stream(self, has_subjects: bool) -> None:
        """On the driver, before the job starts.

        Raises:
            ConfigError: rows would have no subject.
            StreamNotFound, BrokerUnavailable.
        """
        with self.client() as client:
            recorded = subjects_of(client.stream(self.stream))
        is_only_one = len(recorded) == 1 and not has_wildcard(recorded[0])
        if self.subject is None and not has_subjects and not is_only_one:
            shown = ", ".join(map(repr, recorded))
            raise ConfigError(
                f'stream {self.stream!r} has the subjects {shown}: choose one with .option("subject", …), or add a '
                "column subject",
                option="subject",
            )
