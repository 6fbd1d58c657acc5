"""Files of every format version are read for ever: the golden ones in this folder, made once by `make.py`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from natslog.arrow import ipc
from natslog.arrow.batch_metadata import BatchMetadata
from natslog.backup.importing import checked_export
from natslog.cluster.commands import Proposal
from natslog.cluster.encoding import decode_proposal, decode_state, encode_proposal
from natslog.cluster.metadata import Metadata
from natslog.errors import UpgradeRequired
from natslog.log import LogOptions, StreamLog
from natslog.log.checked_file import read_checked
from natslog.log.segment import check_file_header
from natslog.log.verify import check_file, files_of
from natslog.model import StreamSettings
from natslog.node.data_dir import DataDir
from natslog.node.metadata.raft_store import RaftStore
from pyspark_natslog.source.offsets import StreamOffset, from_json, to_json
from tests.golden.make import COMMITS, FIRST_US, PACKED_IDS, REMOVED, STREAM_ID

HERE = Path(__file__).parent
ROWS = [row for commit in COMMITS for row in commit]


def expected() -> list[dict]:
    rows = []
    for at, commit in enumerate(COMMITS):
        for subject, key, headers, value in commit:
            rows.append(
                {
                    "offset": len(rows),
                    "time": FIRST_US + at,
                    "subject": subject,
                    "key": key,
                    "headers": headers,
                    "value": value,
                }
            )
    return rows


def plain(table: pa.Table) -> list[dict]:
    times = table.column("timestamp").cast(pa.int64()).to_pylist()
    rows = table.drop_columns(["timestamp"]).to_pylist()
    return [{"offset": row.pop("offset"), "time": time} | row for row, time in zip(rows, times, strict=True)]


@pytest.mark.parametrize(
    ("golden", "name"),
    [
        ("segment-v1.active", f"{0:020d}.active"),
        ("segment-v1-none.arrow", f"{0:020d}.arrow"),
        ("segment-v1-zstd.arrow", f"{0:020d}.arrow"),
        ("segment-v2.active", f"{0:020d}.active"),
        ("segment-v2-none.arrow", f"{0:020d}.arrow"),
        ("segment-v2-zstd.arrow", f"{0:020d}.arrow"),
    ],
)
def test_segment_is_read(golden: str, name: str, tmp_path: Path) -> None:
    shutil.copy(HERE / golden, tmp_path / name)
    shutil.copy(HERE / "leader-epochs-v1", tmp_path / "leader-epochs")
    shutil.copy(HERE / "hw-checkpoint-v1", tmp_path / "hw-checkpoint")
    assert not check_file(tmp_path / name).problems
    log = StreamLog(tmp_path, STREAM_ID, StreamSettings(subject="x"), LogOptions(min_free_bytes=0))
    assert log.failure is None
    with log.reader.plan_read(0, max_bytes=1 << 20) as plan:
        messages = plan.messages()
    assert plain(pa.Table.from_batches(map(ipc.decode_batch, messages))) == expected()
    assert packed_ids_of(messages) == ([] if "-v1" in golden else [PACKED_IDS[1][0]])


@pytest.mark.parametrize("suffix", ["active", "arrow"])
def test_segment_without_removed_messages_is_read(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"{0:020d}.{suffix}"
    shutil.copy(HERE / f"segment-v2-gaps.{suffix}", path)
    for name in ("leader-epochs", "hw-checkpoint"):
        shutil.copy(HERE / f"{name}-v1", tmp_path / name)
    assert not check_file(path).problems
    log = StreamLog(tmp_path, STREAM_ID, StreamSettings(subject="x"), LogOptions(min_free_bytes=0))
    assert (log.failure, log.log_start_offset, log.log_end_offset) == (None, 0, 4)
    with log.reader.plan_read(0, max_bytes=1 << 20) as plan:
        messages = plan.messages()
        assert (plan.next_offset, plan.removed_rows) == (4, len(REMOVED))
    kept = [row for row in expected() if row["offset"] not in REMOVED]
    assert plain(pa.Table.from_batches(map(ipc.decode_batch, messages))) == kept
    assert packed_ids_of(messages) == [PACKED_IDS[1][0]]


def packed_ids_of(messages: list[bytes]) -> list[list[int]]:
    """Those of rows that have one."""
    found = []
    for message in messages:
        header = ipc.proven_header(message)
        assert header is not None
        ids = ipc.packed_ids_of(header, message)
        found += [] if ids is None else [row for row in ids.tolist() if any(row)]
    return found


def test_batches_v2_byte_for_byte() -> None:
    """What FORMATS.md says of the bytes, checked without natslog's own reader."""
    from crc32c import crc32c

    data = (HERE / "segment-v2.active").read_bytes()
    position = check_file_header(data[:8192], HERE / "segment-v2.active", STREAM_ID, 0)
    first = 0
    for at, (commit, ids) in enumerate(zip(COMMITS, PACKED_IDS, strict=True)):
        header_bytes = 8 + int.from_bytes(data[position + 4 : position + 8], "little")
        header = data[position : position + header_bytes]
        line = header[header.index(b"v2 base_offset=") :].split(b"\0")[0].decode()
        fields = dict(part.split("=") for part in line.split(" ")[1:])
        crcs = fields.pop("crcs").split(".")
        body_bytes = int(fields["body_bytes"])
        assert [int(value) for value in fields.values()] == [
            first, first + len(commit), len(commit), 1, FIRST_US + at, 12 * len(ids or ()), header_bytes, body_bytes,
        ]  # fmt: skip
        assert crc32c(header.replace(f"crcs={crcs[0]}".encode(), b"crcs=00000000")) == int(crcs[0], 16)
        body = data[position + header_bytes : position + header_bytes + body_bytes]
        assert crc32c(body) == int(crcs[-1], 16)
        buffers = pa.ipc.read_message(data[position:]).metadata
        edges = [edge for edge, _ in BatchMetadata(bytes(buffers)).buffers]
        ends = [edges[2], edges[4], edges[7], edges[10], edges[19], body_bytes - (24 if ids else 0)]
        assert [crc32c(body[:end]) for end in ends] == [int(crc, 16) for crc in crcs[1:-1]]
        if ids:
            assert body[-24:] == bytes([*ids[0], *ids[1]])
        position += header_bytes + body_bytes
        first += len(commit)
    assert position == len(data)


def test_active_segment_v1_byte_for_byte() -> None:
    """What FORMATS.md says of the bytes, checked without natslog's own reader."""
    from crc32c import crc32c

    data = (HERE / "segment-v1.active").read_bytes()
    assert data[:8] == b"ARROW1\0\0"
    position = check_file_header(data[:8192], HERE / "segment-v1.active", STREAM_ID, 0)
    for at, commit in enumerate(COMMITS):
        assert data[position : position + 4] == b"\xff\xff\xff\xff"
        header_bytes = 8 + int.from_bytes(data[position + 4 : position + 8], "little")
        header = data[position : position + header_bytes]
        line = header[header.index(b"v1 base_offset=") :].split(b"\0")[0].decode()
        fields = dict(part.split("=") for part in line.split(" ")[1:])
        assert int(fields["rows"]) == len(commit)
        assert int(fields["max_timestamp_us"]) == FIRST_US + at
        assert int(fields["epoch"]) == 1
        assert int(fields["header_bytes"]) == header_bytes
        crcs = f"header_crc32c={fields['header_crc32c']} crc32c={fields['crc32c']}".encode()
        blank = header.replace(crcs, b"header_crc32c=00000000 crc32c=00000000")
        total = header_bytes + int(fields["body_bytes"])
        assert int(fields["header_crc32c"], 16) == crc32c(blank)
        assert int(fields["crc32c"], 16) == crc32c(blank + data[position + header_bytes : position + total])
        position += total
    assert position == len(data)


def test_sealed_segments_v1_open_as_arrow_files() -> None:
    for compression in ("none", "zstd"):
        reader = pa.ipc.open_file(str(HERE / f"segment-v1-{compression}.arrow"))
        assert plain(reader.read_all()) == expected()
        assert reader.metadata[b"natslog.offsets"] == b"0-4"


def test_checked_files_v1_are_read(tmp_path: Path) -> None:
    assert read_checked(HERE / "broker-v1", "broker", 1) == {"broker_id": 1, "cluster_id": "c1"}
    assert read_checked(HERE / "hw-checkpoint-v1", "hw-checkpoint", 1) == {"high_watermark": 4}
    assert read_checked(HERE / "hw-checkpoint-v1-start", "hw-checkpoint", 1) == {
        "high_watermark": 4,
        "log_start_offset": 2,
    }
    assert read_checked(HERE / "log-start-v1", "log-start", 1) == {"log_start_offset": 2}
    assert read_checked(HERE / "leader-epochs-v1", "leader-epochs", 1) == [[1, 0]]
    assert read_checked(HERE / "metadata-v1", "metadata", 1)["tombstones"]["ff" * 16]["name"] == "gone"


def test_metadata_state_v1_is_refused_and_commands_of_that_time_are_read() -> None:
    """natslog 0.1.0 wrote them, and 0.2.0 writes most of these commands in the same form."""
    with pytest.raises(UpgradeRequired, match="the metadata is at feature level 1.*natslog 0.2.0"):
        decode_state((HERE / "metadata-state-v1.msgpack").read_bytes())
    proposals = msgspec.msgpack.decode((HERE / "metadata-proposals-v1.msgpack").read_bytes(), type=list[Proposal])
    assert [decode_proposal(encode_proposal(one)) for one in proposals] == proposals
    kinds = {type(one.command).__name__ for one in proposals}
    assert kinds > {"CreateStream", "EditStream", "DeleteStream", "ChangeIsrs", "AppointLeaders", "MoveReplicas"}


def test_metadata_of_imported_streams_v2_is_read() -> None:
    state = decode_state((HERE / "metadata-imports-state-v2.msgpack").read_bytes())
    states = {name: (one.import_state, one.paused) for name, one in state.streams.items()}
    assert states == {"importing": ("importing", True), "imported": ("imported", True), "resumed": ("", False)}
    imported = state.streams["imported"]
    assert [(fork.id, fork.offset) for fork in imported.lineage] == [("aa", 60), ("bb", 150)]
    assert (imported.first_offset, imported.former_subjects) == (40, ("old.>", "more.>"))
    data = (HERE / "metadata-imports-proposals-v2.msgpack").read_bytes()
    again = Metadata(cluster_id="c1")
    for proposal in msgspec.msgpack.decode(data, type=list[Proposal]):
        again.decide(proposal)
    assert (again.streams, again.brokers, again.feature_level) == (state.streams, state.brokers, state.feature_level)
    assert again.version == state.version - 1, "natslog 0.2.0 raised the level from 1 with the second command"


def test_export_v1_is_read() -> None:
    manifest = checked_export(HERE / "export-v1")
    assert (manifest.name, manifest.rows, manifest.end_offset) == ("orders", 2, 2)
    rows = pa.ipc.open_file(HERE / "export-v1" / manifest.files[0].name).read_all().to_pylist()
    assert [(row["offset"], row["subject"], row["value"]) for row in rows] == [
        (0, "orders.a", b"first"),
        (1, "orders.b", b"second"),
    ]


def test_raft_store_v1_is_refused_and_is_not_changed(tmp_path: Path) -> None:
    shutil.copytree(HERE / "raft-v1", tmp_path / "raft")
    before = contents(tmp_path)
    with pytest.raises(UpgradeRequired, match=r"format of feature level 1.*Start natslog 0\.2\.0 again"):
        RaftStore(tmp_path / "raft")
    assert contents(tmp_path) == before
    assert [check_file(path).problems for path in files_of(tmp_path / "raft")] == [()] * 3


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_raft_store_is_read(tmp_path: Path) -> None:
    shutil.copytree(HERE / "raft-v2", tmp_path / "raft")
    store = RaftStore(tmp_path / "raft")
    assert (store.hard_state.term, store.hard_state.vote, store.hard_state.commit) == (3, 2, 2)
    assert (store.snapshot.index, store.snapshot.data) == (1, b"state")
    assert store.snapshot.membership.voters == (1,)
    assert [(entry.index, entry.term, entry.kind, entry.data) for entry in store.entries] == [
        (2, 2, "empty", b""),
        (3, 3, "command", b"do"),
    ]
    checked = files_of(tmp_path / "raft")
    assert len(checked) == len(list((HERE / "raft-v2").iterdir()))
    for path in checked:
        assert not check_file(path).problems


def test_flip_of_any_bit_of_the_raft_log_is_found_by_verify(tmp_path: Path) -> None:
    shutil.copytree(HERE / "raft-v2", tmp_path / "raft")
    (path,) = (tmp_path / "raft").glob("wal-*")
    data = path.read_bytes()
    for position in range(len(data.rstrip(b"\0"))):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        assert check_file(path).problems, f"byte {position}"
    path.write_bytes(data + b"\0")
    assert check_file(path).problems


@pytest.mark.parametrize("identity", ["broker-v1", "broker-v2"])
def test_identity_of_level_1_is_refused_and_is_not_changed(identity: str, tmp_path: Path) -> None:
    for name in (identity, "life-v1"):
        shutil.copy(HERE / name, tmp_path / name.split("-")[0])
    before = contents(tmp_path)
    with pytest.raises(UpgradeRequired, match="is at feature level 1.*natslog 0.2.0.*finalize-upgrade"):
        DataDir(tmp_path, 1)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("spark-offsets-v1.json", StreamOffset(STREAM_ID, 42)),
        ("spark-offsets-v1-epoch.json", StreamOffset(STREAM_ID, 42, tasks=((1, 20), (0, 42)), epoch=5)),
    ],
)
def test_spark_offsets_are_read_and_written_the_same(file: str, expected: StreamOffset) -> None:
    """Spark compares positions as text: other text for the same position would be an empty batch."""
    text = (HERE / file).read_text()
    offsets = from_json(json.loads(text))
    assert offsets["orders"] == expected
    assert json.dumps(to_json(offsets)) == text
