"""What all tests share: rows to store, the golden files' folder, and which tests stay together in one process."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

from natslog import tracing
from natslog.arrow import ipc
from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE
from natslog.client import NatslogClient
from natslog.log import LogOptions, ReplicaLog, StreamLog
from natslog.model import BrokerId, StreamSettings
from natslog.nats_server import NatsServer
from natslog.node.cluster_clock import ClusterClock, StreamTime
from tests.harness import BrokerProcess

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

STREAM_ID = "ab" * 16
GOLDEN = Path(__file__).parent / "golden"


def rows(values: Sequence[bytes], subject: str = "orders.new") -> RowBuffers:
    """Rows as ingest hands them to the log."""
    count = len(values)
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([subject] * count),
            pa.nulls(count, pa.binary()),
            pa.nulls(count, HEADERS_TYPE),
            pa.array(list(values), pa.binary()),
        ],
        schema=PAYLOAD_SCHEMA,
    )
    return RowBuffers.of(batch)


def open_log(folder: Path, options: LogOptions | None = None, **settings: object) -> ReplicaLog:
    """A log as the broker opens it."""
    wanted = StreamSettings(subject="orders.>", **settings)
    return ReplicaLog(folder, STREAM_ID, wanted, options or LogOptions(min_free_bytes=0))


def retain(log: ReplicaLog, now_us: int) -> int:
    """What a leader does about limits: how many segments it removes."""
    if log.settings.age_limit_s is not None:
        log.limits.expire(now_us)
    return log.upkeep.enforce_retention()


def stream_time_of(log: StreamLog) -> StreamTime:
    """As of a broker that has no cluster yet: the wall clock, held at the monotonic one."""
    clock = ClusterClock(BrokerId(1), log.folder.parent / "clock")
    return StreamTime(clock, log.newest_timestamp_us, log.idle_s)


def stored_values(log: StreamLog, start: int = 0) -> list[bytes]:
    """All values from `start` to the high watermark, read through the public reader."""
    values: list[bytes] = []
    while start < log.high_watermark:
        with log.reader.plan_read(start, max_bytes=1 << 20) as plan:
            for message in plan.messages():
                batch = decoded(message)
                offsets = batch.column("offset").to_pylist()
                values += [value for at, value in zip(offsets, batch["value"].to_pylist(), strict=True) if at >= start]
            start = plan.next_offset
    return values


def decoded(message: bytes) -> pa.RecordBatch:
    return ipc.decode_batch(message)


OWN_SPARKS = (
    "test_demo_tls.py",
    "test_jobs.py",
    "test_newcomer.py",
    "test_notebook.py",
    "test_places.py",
    "test_secrets.py",
)
"""Files of `tests/spark` whose tests start a Spark each: they stay by themselves."""


_SPARK_SESSIONS = 2


class FilesTogether(LoadScopeScheduling):
    """`--dist loadfile`: a file stays in one process. The files that share a Spark session are two groups, each with a
    session of its own. In `make test`, which has few of them, they share one, as those of the columnar reader do.
    """

    def _split_scope(self, nodeid: str) -> str:
        is_short = "not long" in self.config.getoption("markexpr")
        return scope_of(nodeid, 1 if is_short else _SPARK_SESSIONS, are_columnar_together=is_short)


def scope_of(nodeid: str, spark_sessions: int, *, are_columnar_together: bool) -> str:
    """Tests of one scope stay in one process."""
    file = nodeid.partition("::")[0]
    if file.startswith("tests/spark/") and not file.endswith(OWN_SPARKS):
        return f"spark {zlib.crc32(file.encode()) % spark_sessions}"
    return "columnar" if are_columnar_together and file.startswith("tests/columnar/") else file


_FIRST = ("tests/soak/", "tests/spark/", "tests/columnar/test_table_job.py", "tests/columnar/test_switching.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no process is left with it at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(_FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return FilesTogether(config, log) if config.getvalue("dist") == "loadfile" else None


_numbers = count()


@pytest.fixture
def name() -> str:
    """A stream name of this test's own; its subject space is the same word."""
    return f"test{next(_numbers)}"


@pytest.fixture
def nats_url(shared: tuple[NatsServer, BrokerProcess]) -> str:
    """Of the server that the folder's `shared` fixture runs."""
    return shared[0].url


@pytest.fixture
def broker(shared: tuple[NatsServer, BrokerProcess]) -> BrokerProcess:
    return shared[1]


@pytest.fixture
def client(broker: BrokerProcess) -> NatslogClient:
    return broker.client()


@pytest.fixture
def log_folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """The spans of this process, once they have ended."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)
