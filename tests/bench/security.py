"""What security costs: TLS, tokens and rules on scans; TLS on publishing with acks.

Four brokers hold the same rows: one without security, one with tokens, one with tokens and TLS; each side of a pair
reads all rows from one of them. The rules "without a match" are 900 rules for other streams and identities; the limited
identity may read the subject that all rows have, so that each row is compared and none is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from natslog.client import ClientOptions, NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.nats_server import NatsServer
from natslog.security.certificates import make_certificates
from natslog.wire.credentials import NatsCredentials
from tests.bench.pairs import Comparison, compare
from tests.bench.sides import STREAM, SUBJECT, raw_publish, scratch
from tests.bench.spark_scan import is_sealed, rows_per_second
from tests.bench.spark_session import spark_session
from tests.harness import BrokerProcess, eventually
from tests.integration.test_access import admin_token

_FLOOD_SECONDS = 4.0
_RULES = 900
_SETTINGS = {"segment_bytes": "64MiB", "segment_age": "1s", "retention_interval": "500ms"}
_BATCH_ROWS, _BATCHES = 2000, 150


@dataclass(frozen=True, slots=True)
class Side:
    """A broker with the rows. `token_file`: of an identity that may read them; "" without security."""

    broker: BrokerProcess
    admin: NatslogClient
    rows: int
    ca_file: str | None = None
    token_file: str = ""

    def client(self) -> NatslogClient:
        options = ClientOptions(token_file=self.token_file or None, tls_ca_file=self.ca_file)
        return NatslogClient(self.broker.url, options)

    def scan(self, spark: SparkSession) -> float:
        """Rows a second into Spark's `noop`."""
        reader = spark.read.format("natslog").option("servers", self.broker.url).option("stream", STREAM)
        if self.token_file:
            reader = reader.option("tokenFile", self.token_file)
        if self.ca_file is not None:
            reader = reader.option("tlsCaFile", self.ca_file)
        return rows_per_second(reader.load(), self.rows)

    def read(self) -> float:
        """Rows a second with the client, without Spark."""
        started = time.perf_counter()
        with self.client() as client:
            assert sum(batch.num_rows for batch in client.read(STREAM)) == self.rows
        return self.rows / (time.perf_counter() - started)


@contextmanager
def filled(folder: Path, *, secured: bool = False, tls: bool = False) -> Iterator[Side]:
    """A broker with sealed segments of rows of 128 bytes."""
    folder.mkdir(parents=True)
    server = NatsServer(0, folder / "nats.log").start()
    settings = dict(_SETTINGS)
    ca_file: str | None = None
    if tls:
        make_certificates(folder / "certs", None, ["client"], 30)
        ca_file = str(folder / "certs" / "ca.pem")
        settings |= {"tls_ca_file": ca_file, "tls_cert_file": str(folder / "certs" / "broker.pem")}
        settings |= {"tls_key_file": str(folder / "certs" / "broker-key.pem")}
    broker = BrokerProcess(folder / "data", server.url, **settings)
    broker.environment = {"NATSLOG_SECURITY": "true"} if secured else {}
    try:
        broker.start()
        admin = NatslogClient(
            broker.url, ClientOptions(token=admin_token(broker) if secured else None, tls_ca_file=ca_file)
        )
        admin.create_stream(STREAM, SUBJECT)
        raw_publish(server, "flood", bytes=128, seconds=_FLOOD_SECONDS)
        eventually(lambda: is_sealed(broker.folder), 120, "every segment is sealed", every_s=1.0)
        rows = int(admin.position(STREAM)["high_watermark"])
        yield Side(broker, admin, rows, ca_file)
    finally:
        broker.kill()
        server.stop()


def identity(side: Side, folder: Path, name: str, *rules: tuple[str, str]) -> Side:
    """The same side, read by an identity that may read these streams and subjects."""
    file = folder / f"{name}.token"
    file.touch(mode=0o600)
    file.write_text(side.admin.create_token(name)["token"])
    for stream, subject in rules:
        side.admin.add_rule(name, "read", stream, subject)
    return Side(side.broker, side.admin, side.rows, side.ca_file, str(file))


def costs(pairs: int) -> list[Comparison]:
    with scratch() as folder, spark_session() as spark, ExitStack() as running:
        plain = running.enter_context(filled(folder / "plain"))
        secured = running.enter_context(filled(folder / "secured", secured=True))
        encrypted = running.enter_context(filled(folder / "encrypted", secured=True, tls=True))
        token = identity(secured, folder, "token", (STREAM, ">"))
        tls = identity(encrypted, folder, "tls", (STREAM, ">"))
        others = [(f"other{number}*", f"other.{number}.>") for number in range(_RULES)]
        ruled = identity(secured, folder, "ruled", *others, (STREAM, ">"))
        limited = _limited(secured, folder)
        for side in (plain, token, tls, ruled, limited):
            side.scan(spark)
        lines = [
            ("scan with a token and TLS", 0.6, tls.scan, plain.scan, "the same without security"),
            ("scan with a token", 0.9, token.scan, plain.scan, "the same without security"),
            (f"scan with a token and {_RULES} rules without a match", 0.9, ruled.scan, token.scan, "without the rules"),
        ]
        found = [
            compare(
                title,
                "rows/s",
                bar,
                ours=lambda ours=ours: ours(spark),
                peer=peer,
                theirs=lambda theirs=theirs: theirs(spark),
                pairs=pairs,
            )
            for title, bar, ours, theirs, peer in lines
        ]
        found += [
            compare(
                title,
                "rows/s",
                bar,
                ours=ours.read,
                peer="the same without security",
                theirs=plain.read,
                pairs=pairs,
            )
            for title, bar, ours in (
                ("client read with a token and TLS", 0.6, tls),
                ("client read with a token", 0.9, token),
                ("client read limited to subjects that all rows have", 0.0, limited),
            )
        ]
        found[0].notes["rows"] = plain.rows
    return [*found, *_publishing(pairs)]


def _limited(secured: Side, folder: Path) -> Side:
    """An identity that may read the subject of all rows, in a stream that may have recorded others."""
    secured.admin.edit_stream(STREAM, subject=f"{SUBJECT}.>")
    secured.admin.edit_stream(STREAM, subject=SUBJECT)
    return identity(secured, folder, "limited", (STREAM, SUBJECT))


# ---- publishing ----


@contextmanager
def _nats_side(folder: Path, *, tls: bool) -> Iterator[Callable[[], float]]:
    """Messages a second, each acked by a stream, of one publisher; with TLS and a user for it and for the broker."""
    folder.mkdir(parents=True)
    credentials, settings, arguments = NatsCredentials(), {}, ()
    if tls:
        make_certificates(folder / "certs", None, ["client"], 30)
        password = folder / "password"
        password.touch(mode=0o600)
        password.write_text("of-the-bench")
        certs = folder / "certs"
        (folder / "nats.conf").write_text(
            f'tls {{ cert_file: "{certs}/broker.pem", key_file: "{certs}/broker-key.pem" }}\n'
            "authorization { user: bench, password: of-the-bench }\n"
        )
        files = {"user": "bench", "password_file": str(password), "tls_ca_file": str(certs / "ca.pem")}
        credentials = NatsCredentials(**files)
        settings = {f"nats_{name}": value for name, value in files.items()}
        arguments = ("--config", str(folder / "nats.conf"))
    server = NatsServer(0, folder / "nats.log", arguments=arguments).start()
    broker = BrokerProcess(folder / "data", server.url, **settings)
    try:
        with broker.start().client() as client:
            client.create_stream(STREAM, SUBJECT)
        rows = Rows(pa.array([SUBJECT] * _BATCH_ROWS), pa.array([bytes(128)] * _BATCH_ROWS, pa.binary()))

        def rate() -> float:
            with Publisher(server.url, credentials=credentials) as publisher:
                started = time.perf_counter()
                for _ in range(_BATCHES):
                    publisher.publish(rows, "stored")
                return _BATCHES * _BATCH_ROWS / (time.perf_counter() - started)

        yield rate
    finally:
        broker.kill()
        server.stop()


def _publishing(pairs: int) -> list[Comparison]:
    with (
        scratch() as folder,
        _nats_side(folder / "plain", tls=False) as plain,
        _nats_side(folder / "tls", tls=True) as encrypted,
    ):
        plain(), encrypted()
        return [
            compare(
                "acked publish over NATS with TLS and a user",
                "messages/s",
                0.9,
                ours=encrypted,
                peer="NATS without",
                theirs=plain,
                pairs=pairs,
            )
        ]
