"""The columnar reader and brokers that serve TLS: certificates of both sides, replaced files, and waits that end."""

from __future__ import annotations

import hashlib
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from natslog.client import ClientOptions, NatslogClient
from natslog.security.certificates import make_certificates
from tests.columnar.test_connections import Relay, with_length
from tests.columnar.test_hostile import ROWS, Server
from tests.columnar.test_hostile import read as read_relay
from tests.columnar.test_real_time import Query, short_batches
from tests.harness import BrokerProcess, eventually, publish_acked, running

LARGE = [bytes([at]) * 900_000 for at in range(20)]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, ["localhost", "127.0.0.1"], ["client"], 30)
    return folder


def of_broker(folder: Path) -> dict[str, str]:
    names = {"tls_cert_file": "broker.pem", "tls_key_file": "broker-key.pem", "tls_ca_file": "ca.pem"}
    return {name: str(folder / file) for name, file in names.items()}


def of_client(folder: Path) -> dict[str, str]:
    return {"tlsCertFile": str(folder / "client.pem"), "tlsKeyFile": str(folder / "client-key.pem")}


@pytest.fixture(scope="module", params=["optional", "required"])
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, certificates: Path
) -> Iterator[BrokerProcess]:
    """Client certificates are optional, or required."""
    settings = of_broker(certificates) | {"tls_client_certs": request.param}
    with running(tmp_path_factory.mktemp("broker") / "natslog", **settings) as (nats, found):
        options = ClientOptions(
            tls_ca_file=str(certificates / "ca.pem"),
            tls_cert_file=str(certificates / "client.pem"),
            tls_key_file=str(certificates / "client-key.pem"),
        )
        with NatslogClient(found.url, options) as client:
            client.create_stream("large", "large")
        publish_acked(nats.url, "large", LARGE)
        yield found


def read(spark: SparkSession, broker: BrokerProcess, **more: str) -> DataFrame:
    options = {"servers": broker.url, "stream": "large", "fetchRetries": "0", "fetchTimeout": "5s"}
    return spark.read.format("natslog").options(**(options | more)).load()


def test_rows_arrive_unchanged_with_the_certificates_of_both_sides(
    spark: SparkSession, broker: BrokerProcess, certificates: Path
) -> None:
    frame = read(spark, broker, tlsCaFile=str(certificates / "ca.pem"), **of_client(certificates))
    assert "natslog stream large" in frame._jdf.queryExecution().toString(), "the columnar reader"
    for _ in range(2):
        assert [bytes(row.value) for row in frame.orderBy("offset").collect()] == LARGE


def test_rows_arrive_in_real_time(
    spark: SparkSession, broker: BrokerProcess, certificates: Path, tmp_path: Path
) -> None:
    """Over a connection that is quiet for a while: reads of it end without a message, and it goes on."""
    options = {"servers": broker.url, "stream": "large", "tlsCaFile": str(certificates / "ca.pem")}
    options |= of_client(certificates)
    read = (
        spark.readStream.format("natslog").options(**options, startingOffsets="latest", columns="offset,value").load()
    )
    with short_batches(spark):
        query = Query(read.selectExpr("offset", "md5(value) as value"), tmp_path, realTime="5 seconds")
        eventually(lambda: query.running.lastProgress, 60, "a batch has ended")
        for number in range(3):
            time.sleep(1.5)
            publish_acked(broker.nats_url, "large", [LARGE[0]])
            query.until(number + 1)
        assert query.rows("value") == [hashlib.md5(LARGE[0]).hexdigest()] * 3


def test_certificates_that_are_missing_are_named(
    spark: SparkSession, broker: BrokerProcess, certificates: Path, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(Exception, match="give the CA that signed the broker's certificate"):
        read(spark, broker, **of_client(certificates)).collect()
    ca = str(certificates / "ca.pem")
    if request.node.callspec.params["broker"] == "optional":
        assert read(spark, broker, tlsCaFile=ca).count() == len(LARGE)
        return
    for _ in range(5):
        with pytest.raises(Exception, match=r"it may (also )?require a client certificate \(tlsCertFile"):
            read(spark, broker, tlsCaFile=ca).collect()


def test_http_at_a_broker_that_serves_tls_says_so(spark: SparkSession, broker: BrokerProcess) -> None:
    plain = broker.url.replace("https:", "http:")
    with pytest.raises(Exception, match="if it serves TLS, its URL begins with https://"):
        read(spark, broker, servers=plain).collect()


def test_files_that_are_replaced_are_used(
    spark: SparkSession, broker: BrokerProcess, certificates: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    make_certificates(other, ["localhost"], ["client"], 30)
    ca = tmp_path / "ca.pem"
    shutil.copy(other / "ca.pem", ca)
    frame = read(spark, broker, servers=broker.url, tlsCaFile=str(certificates / "ca.pem"), **of_client(certificates))
    assert frame.count() == len(LARGE)
    with pytest.raises(Exception, match="give the CA"):
        read(spark, broker, tlsCaFile=str(ca), **of_client(certificates)).collect()
    shutil.copy(certificates / "ca.pem", ca)
    assert read(spark, broker, tlsCaFile=str(ca), **of_client(certificates)).count() == len(LARGE)
    ca.write_text("-----BEGIN CERTIFICATE-----\n")
    with pytest.raises(Exception, match="the TLS files cannot be used"):
        read(spark, broker, tlsCaFile=str(ca), **of_client(certificates)).collect()


@pytest.fixture
def relay(certificates: Path) -> Iterator[Relay]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "broker.pem", certificates / "broker-key.pem")
    with ExitStack() as closing:
        server = closing.enter_context(Server())
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        closing.callback(thread.join)
        closing.callback(server.shutdown)
        yield closing.enter_context(Relay(server, context))


def test_connection_that_was_closed_meanwhile_costs_no_retry(
    spark: SparkSession, relay: Relay, certificates: Path
) -> None:
    frame = read_relay(spark, relay, fetchRetries="0", retryInterval="60s", tlsCaFile=str(certificates / "ca.pem"))
    frame.collect()
    opened = relay.opened
    frame.collect()
    assert relay.opened == opened, "connections are used again"
    started_s = time.monotonic()
    for _ in range(3):
        relay.drop()
        assert len(frame.collect()) == ROWS
    assert time.monotonic() - started_s < 60, "a retry waits for that long"


def test_task_that_waits_can_be_cancelled(spark: SparkSession, relay: Relay, certificates: Path) -> None:
    waiting = threading.Event()

    def hang(peer: socket.socket) -> None:
        peer.sendall(with_length()[:400])
        waiting.set()
        relay.stopped.wait(60)

    relay.respond = hang
    frame = read_relay(spark, relay, fetchTimeout="50s", tlsCaFile=str(certificates / "ca.pem"))
    errors: list[str] = []

    def collect() -> None:
        spark.sparkContext.setJobGroup("waits for TLS", "a job that waits", interruptOnCancel=True)
        try:
            frame.collect()
        except Exception as error:
            errors.append(str(error))

    thread = threading.Thread(target=collect)
    thread.start()
    assert waiting.wait(30)
    started_s = time.monotonic()
    spark.sparkContext.cancelJobGroup("waits for TLS")
    thread.join(60)
    assert "cancelled" in errors[0]
    eventually(lambda: not spark.sparkContext.statusTracker().getActiveStageIds(), 30, "the task has ended")
    assert time.monotonic() - started_s < 30
