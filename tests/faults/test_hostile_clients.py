"""One client cannot harm the others: floods of connections, slow readers, unfinished uploads."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pyarrow as pa
import pytest

from natslog.client import ClientOptions, NatslogClient
from natslog.client.appending import PartUploader
from natslog.nats_server import NatsServer
from tests.cluster_harness import Cluster, ClusterBroker
from tests.faults.hostile import KINDS
from tests.harness import BrokerProcess, all_values, eventually, publish_acked, running
from tests.integration.test_access import admin_token
from tests.integration.test_activity import events, found

FILES = 1024


@contextmanager
def limited(
    folder: Path, files: int, settings: Mapping[str, str] = {}, **environment: str
) -> Iterator[tuple[NatsServer, BrokerProcess]]:
    """A broker that may open so many files."""
    folder.mkdir(parents=True, exist_ok=True)
    server = NatsServer(0, folder / "nats.log").start()
    broker = BrokerProcess(folder / "data", server.url, **settings)
    broker.environment = environment
    broker.prefix = ["prlimit", f"--nofile={files}:{files}"]
    try:
        yield server, broker.start()
    finally:
        broker.kill()
        server.stop()


def connect(broker: BrokerProcess, within_s: float = 10) -> socket.socket:
    address = urlsplit(broker.url)
    return socket.create_connection((address.hostname, address.port), within_s)


def first_bytes(connection: socket.socket) -> bytes:
    """What has been answered so far."""
    connection.setblocking(False)
    try:
        return connection.recv(4096) or b"closed"
    except BlockingIOError:
        return b""
    except ConnectionResetError:
        return b"closed"
    finally:
        connection.settimeout(10)


@pytest.mark.parametrize(
    "sent",
    [pytest.param(b"", id="silent"), pytest.param(b"GET /healthz HT", id="half a request", marks=pytest.mark.long)],
)
def test_more_idle_connections_than_files_leave_room_for_the_others(tmp_path: Path, sent: bytes) -> None:
    with limited(tmp_path / "own", FILES) as (nats, broker), ExitStack() as idle:
        broker.client().create_stream("orders", "orders")
        for _ in range(FILES + 76):
            one = idle.enter_context(connect(broker))
            one.sendall(sent)
        fds = psutil.Process(broker.pid).num_fds
        eventually(
            lambda: FILES // 16 < fds() < FILES // 4, what="newcomers of one address have an eighth of the places"
        )
        assert broker.ready()
        assert publish_acked(nats.url, "orders", [b"a"])[0]["offset"] == 0
        broker.client().create_stream("more", "more")
        assert publish_acked(nats.url, "more", [b"b"])[0]["offset"] == 0
        assert all_values(broker.client(), "orders") == [b"a"]
        assert psutil.Process(broker.pid).num_fds() < 0.9 * FILES
        idle.close()
        eventually(lambda: psutil.Process(broker.pid).num_fds() < 100, 30, "their files are closed")
        assert "Traceback" not in broker.output()
        assert broker.terminate() < 5


def test_unfinished_sign_ins_take_no_places_from_others_and_leave_few_lines(tmp_path: Path) -> None:
    """Also while their requests are received: clients without an identity have few places, and make few lines."""
    with limited(tmp_path / "own", FILES, NATSLOG_SECURITY="true") as (_, broker), ExitStack() as unfinished:
        head = b"POST /v1/session HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        for _ in range(FILES):
            unfinished.enter_context(connect(broker)).sendall(head)
        with admin_of(broker) as admin:
            admin.create_stream("orders", "orders")
            for _ in range(20):
                request = urllib.request.Request(f"{broker.url}/v1/session", method="DELETE")
                with urllib.request.urlopen(request, timeout=30) as answer:
                    assert answer.status == 204
            assert psutil.Process(broker.pid).num_fds() < FILES // 4
            admin.delete_stream("orders")
            last = found(admin, "stream.deleted", stream="orders")
            assert not [one for one in events(admin) if "/v1/session" in json.dumps(one)], "nothing was signed out of"
            assert last["identity"] == "admin"
        audit = [line for line in broker.output().splitlines() if "natslog.audit" in line and "/v1/session" in line]
        assert len(audit) <= 2, "a line for an address and minute"
        assert "Traceback" not in broker.output()


@pytest.mark.long
def test_more_long_polls_than_connections_are_refused_and_operators_still_served(tmp_path: Path) -> None:
    with limited(tmp_path / "own", FILES) as (nats, broker), ExitStack() as polling:
        broker.client().create_stream("orders", "orders")
        head = b"GET /v1/streams/orders/messages?start=0&wait_ms=60000 HTTP/1.1\r\nHost: x\r\n\r\n"
        polls = []
        for count in range(FILES):
            one = polling.enter_context(connect(broker))
            one.sendall(head)
            polls.append(one)
            if count % 100 == 0:
                time.sleep(0.2)
        waiting = [one for one in polls if first_bytes(one) == b""]
        assert 400 < len(waiting) <= FILES // 2 + 64

        def answer_to_one_more() -> bytes:
            """Empty where there was room: a busy broker has closed some whose requests it had not read yet."""
            one_more = polling.enter_context(connect(broker, 1))
            one_more.sendall(head)
            try:
                return one_more.recv(4096)
            except TimeoutError:
                return b""

        refused = eventually(answer_to_one_more, 60, "one more is refused")
        assert refused.startswith(b"HTTP/1.1 429")
        assert b'"code": "overloaded"' in refused
        assert broker.ready()
        assert publish_acked(nats.url, "orders", [b"a"])[0]["offset"] == 0
        assert waiting[0].recv(12) == b"HTTP/1.1 200"
        assert "Traceback" not in broker.output()


@pytest.mark.long
@pytest.mark.parametrize("sent", [b"", b"GET /v1/streams HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["idle", "refused"])
def test_five_thousand_connections_without_credentials_leave_room_for_the_others(tmp_path: Path, sent: bytes) -> None:
    connections = 5000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < connections + 1000:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (connections + 1000, hard))
    try:
        with with_orders(tmp_path / "own", NATSLOG_SECURITY="true") as (nats, broker), ExitStack() as open_ones:
            before = psutil.Process(broker.pid).memory_info().rss
            for _ in range(connections):
                open_ones.enter_context(connect(broker)).sendall(sent)
            with admin_of(broker) as admin:
                started = time.monotonic()
                assert sum(batch.num_rows for batch in admin.read("orders")) == ROWS
                assert publish_acked(nats.url, "honest", [b"a"] * 100)[-1]["offset"] == 99
                taken_s = time.monotonic() - started
            more = psutil.Process(broker.pid).memory_info().rss - before
            print(f"{connections} connections: {more / connections / 1024:.0f} KiB each, reading took {taken_s:.1f} s")
            assert taken_s < 30
            assert more < 400 * 2**20
            open_ones.close()
            eventually(lambda: psutil.Process(broker.pid).num_fds() < 200, 30, "their files are closed")
            assert "Traceback" not in broker.output()
            assert broker.terminate() < 5
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def isr_of_orders(broker: ClusterBroker) -> list[int]:
    """As this broker's metadata has it."""
    found = broker.json("/v1/streams", timeout_s=5) or []
    return sorted(number for stream in found if stream["name"] == "orders" for number in stream["isr"])


def refuses(broker: ClusterBroker) -> bool:
    """Whether it answers a new connection that all of them are in use."""
    answer = broker.ask("GET", "/v1/cluster")
    return answer is not None and answer.status == 429


@pytest.mark.long
def test_restarted_broker_comes_back_into_the_isr_of_a_leader_whose_connections_are_all_long_polls(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path)
    asked, leader, peer = cluster.brokers
    leader.prefix = ["prlimit", f"--nofile={FILES // 2}:{FILES // 2}"]
    try:
        with cluster.start().client() as client:
            client.create_stream("orders", "orders", replicas=3)
            client.move_stream("orders", [leader.number, asked.number, peer.number])
            eventually(lambda: client.stream("orders")["leader"] == leader.number, 40, "broker 2 leads")
        cluster.wait_in_sync()
        peer.kill()
        assert publish_acked(cluster.nats_url, "orders", [b"a"])[0]["offset"] == 0
        assert isr_of_orders(asked) == [asked.number, leader.number]
        with hostile("long polls", leader, FILES // 4 + 40):
            eventually(lambda: refuses(leader), 30, "long polls hold every connection")
            peer.start()
            eventually(lambda: isr_of_orders(asked) == [1, 2, 3], 40, "broker 3 is in sync again", every_s=0.2)
            assert refuses(leader), "long polls hold every connection all the time"
        assert publish_acked(cluster.nats_url, "orders", [b"b"])[0]["offset"] == 1
    finally:
        cluster.close()


ROWS, VALUE = 20_000, b"v" * 1000


class Honest:
    """A publisher that waits for acks, and a reader of whole ranges: what each gets done in a second."""

    def __init__(self, nats: NatsServer, broker: BrokerProcess, token: str | None = None) -> None:
        self._nats = nats
        self._client = NatslogClient(broker.url, ClientOptions(retries=3, patience_s=10, token=token))

    def rates(self, seconds: float = 3) -> tuple[float, float]:
        acked, read = 0, 0

        def publish() -> None:
            nonlocal acked
            while time.monotonic() < ends:
                acked += len(publish_acked(self._nats.url, "honest", [VALUE] * 500))

        def fetch() -> None:
            nonlocal read
            while time.monotonic() < ends:
                read += sum(batch.num_rows for batch in self._client.read("orders"))

        started = time.monotonic()
        ends = started + seconds
        with ThreadPoolExecutor(2) as pool:
            for task in [pool.submit(publish), pool.submit(fetch)]:
                task.result()
        passed = time.monotonic() - started
        return acked / passed, read / passed


@contextmanager
def watched(broker: BrokerProcess) -> Iterator[list[int]]:
    """The broker's memory in use meanwhile, in bytes: the last element is the most there was."""
    most, stop = [0], threading.Event()

    def watch() -> None:
        process = psutil.Process(broker.pid)
        while not stop.wait(0.05):
            most.append(max(most[-1], process.memory_info().rss))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()


@contextmanager
def with_orders(folder: Path, **environment: str) -> Iterator[tuple[NatsServer, BrokerProcess]]:
    """A broker with a stream of 20 MB, and one for an honest publisher."""
    with running(folder, environment=environment) as (nats, broker):
        client = admin_of(broker) if environment else broker.client()
        for name in ("orders", "honest"):
            client.create_stream(name, name)
        for _ in range(ROWS // 2000):
            publish_acked(nats.url, "orders", [VALUE] * 2000)
        yield nats, broker


def admin_of(broker: BrokerProcess) -> NatslogClient:
    """A client of the administrator, with the token that the first start has printed."""
    return NatslogClient(broker.url, ClientOptions(token=admin_token(broker)))


@pytest.mark.alone
@pytest.mark.long
def test_slow_readers_of_rewritten_answers_take_little_from_the_others(tmp_path: Path) -> None:
    with with_orders(tmp_path / "own") as (nats, broker), ExitStack() as slow:
        honest = Honest(nats, broker)
        honest.rates(2)
        before = honest.rates()
        with watched(broker) as memory:
            head = (
                b"GET /v1/streams/orders/messages?start=0 HTTP/1.1\r\nHost: x\r\nAccept: application/x-ndjson\r\n\r\n"
            )
            for _ in range(500):
                one = slow.enter_context(connect(broker))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.sendall(head)
            during = honest.rates()
        print("honest before", before, "during", during, "RSS", memory[-1] / 2**20)
        assert memory[-1] < 600 * 2**20
        assert during[0] > 0.5 * before[0]
        assert during[1] > 0.5 * before[1]
        seconds = broker.terminate()
        assert seconds < 5, seconds


@pytest.mark.long
def test_unfinished_commits_take_little_memory_and_no_place_for_long(tmp_path: Path) -> None:
    with running(tmp_path / "own") as (_, broker), ExitStack() as unfinished:
        broker.client().create_stream("orders", "orders")
        head = b"POST /v1/streams/orders/appends/p/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 16777216\r\n\r\n"
        body = b" " * (16 * 2**20 - 1)
        with watched(broker) as memory:
            sending = [unfinished.enter_context(connect(broker)) for _ in range(60)]
            with ThreadPoolExecutor(20) as pool:
                for one in sending:
                    pool.submit(sent_as_far_as_taken, one, head + body)
            uploader = PartUploader(broker.client(), "orders", "honest", 0)
            uploader.add(pa.RecordBatch.from_pydict({"value": pa.array([b"a", b"b"], pa.binary())}))
            assert broker.client().commit_append("orders", "honest", 0, uploader.finish()).end == 2
        assert memory[-1] < memory[1] + 200 * 2**20, (memory[1] / 2**20, memory[-1] / 2**20)
        answers = []
        for one in sending:
            one.settimeout(40)
            answers.append(one.recv(12))
        assert set(answers) <= {b"HTTP/1.1 408", b"HTTP/1.1 429"}, "what is not sent to its end is given up"


def sent_as_far_as_taken(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError:
        return


@contextmanager
def hostile(kind: str, broker: BrokerProcess, count: int = 200, *token_file: str) -> Iterator[None]:
    """So many connections of a kind, in a process of their own; with the token of a file, if one is given."""
    command = [sys.executable, "-m", "tests.faults.hostile", kind, broker.url, "orders", str(count), *token_file]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            yield
        finally:
            process.kill()


@dataclass
class Attacked:
    """A broker with security, an identity that may read and publish (`token_file`), and an honest one."""

    broker: BrokerProcess
    token_file: Path
    honest: Honest


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("attacked")
    with with_orders(folder / "own", NATSLOG_SECURITY="true") as (nats, broker), admin_of(broker) as admin:
        token_file = folder / "low.token"
        token_file.write_text(admin.create_token("low")["token"])
        for who, action in (("low", "read"), ("low", "publish"), ("honest", "read")):
            admin.add_rule(who, action, "orders")
        honest = Honest(nats, broker, admin.create_token("honest")["token"])
        honest.rates(1)
        yield Attacked(broker, token_file, honest)
        assert broker.terminate() < 5


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_connections_of_a_kind_leave_the_honest_their_pace(attacked: Attacked, kind: str) -> None:
    """200 without credentials, and 200 with those of an identity that may read and publish. At least 80 %, in the best
    of up to five pairs: the machine has other noise.
    """
    shares: list[float] = []
    broker, honest = attacked.broker, attacked.honest
    with watched(broker) as memory:
        for _ in range(5):
            before = honest.rates(2)
            with hostile(kind, broker), hostile(kind, broker, 200, str(attacked.token_file)):
                time.sleep(1)
                during = honest.rates(2)
            shares.append(min(during[0] / before[0], during[1] / before[1]))
            if shares[-1] >= 0.8:
                break
        print(kind, "share", max(shares), "RSS", memory[-1] // 2**20, "MiB")
    assert max(shares) >= 0.8, shares
    assert memory[-1] <= 600 * 2**20
