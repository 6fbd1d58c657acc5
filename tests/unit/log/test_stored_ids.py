"""Message ids outlive the rows that they were stored with, for as long as the deduplication window asks for them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE
from natslog.ingest.dedupe import NEW
from natslog.log import LogOptions, ReplicaLog, stored_ids
from natslog.log.erasing import ErasedOffsets
from natslog.log.removed import offset_set, to_bytes
from natslog.log.stored_ids import KeptIds, StoredIds
from natslog.model import Epoch
from natslog.node.writes.dedupe_rebuild import rebuilt_dedupe
from natslog.wire.message_ids import ids_of_headers
from tests.conftest import open_log, retain

BEGAN_US = 1_700_000_000_000_000
SECOND_US = 1_000_000
WINDOW_S = 120.0
SMALL = LogOptions(segment_bytes=4096, min_free_bytes=0)


def append(log: ReplicaLog, texts: list[str | None], at_us: int = BEGAN_US) -> int:
    """Rows with these message ids. Returns the offset of the first."""
    headers = [None if text is None else [("Nats-Msg-Id", text)] for text in texts]
    count = len(texts)
    columns = [
        pa.array(["orders.a"] * count),
        pa.nulls(count, pa.binary()),
        pa.array(headers, HEADERS_TYPE),
        pa.array([b"v" * 400] * count),
    ]
    base, _ = log.append(RowBuffers.of(pa.RecordBatch.from_arrays(columns, schema=PAYLOAD_SCHEMA)), at_us)
    return base


def offsets_of(log: ReplicaLog, texts: list[str], at_us: int = BEGAN_US, window_s: float = WINDOW_S) -> list[int]:
    """Where a new leader takes messages with these ids to be stored."""
    window, damage = rebuilt_dedupe(window_s, log)
    assert damage is None
    ids = ids_of_headers(pa.array([[("Nats-Msg-Id", text)] for text in texts], HEADERS_TYPE))
    assert ids is not None
    return window.find(ids, at_us).tolist()


def erase(log: ReplicaLog, offsets: list[int]) -> None:
    bitmap = offset_set(np.array(sorted(offsets), np.int64))
    record = ErasedOffsets(
        id="e", erases="subject", below=log.log_end_offset, requested_us=BEGAN_US, messages=1, offsets=to_bytes(bitmap)
    )
    log.visibility.removed.record(record.bitmap("test"))
    log.erasures.add(record, "test")
    log.roll()
    while log.upkeep.seal_next() or log.upkeep.erase_next(BEGAN_US):
        pass


@pytest.fixture
def log(log_folder: Path) -> Any:
    log = open_log(log_folder, SMALL)
    yield log
    log.close()


@pytest.mark.parametrize("way", ["max_messages", "max_bytes", "max_age_s", "purge", "a leader's start"])
def test_ids_of_messages_whose_files_are_removed_are_known_to_the_next_leader(log_folder: Path, way: str) -> None:
    limits = {"max_messages": 20, "max_bytes": 64 * 1024, "max_age_s": 0.001}
    log = open_log(log_folder, SMALL, **({way: limits[way]} if way in limits else {}))
    texts = [f"id-{at}" for at in range(1000)]
    for at in range(0, 1000, 10):
        append(log, texts[at : at + 10], BEGAN_US + at)
    if way == "purge":
        log.chain.purged_below = 900
        log.upkeep.drop_before(900)
    elif way == "a leader's start":
        log.upkeep.drop_before(900)
    else:
        while retain(log, BEGAN_US + SECOND_US):
            pass
    assert log.log_start_offset > 500
    assert offsets_of(log, texts) == list(range(1000))
    log.close()
    log = open_log(log_folder, SMALL)
    assert offsets_of(log, texts) == list(range(1000)), "and after a restart"
    log.close()


def test_id_of_an_erased_message_is_kept_as_a_hash_only(log: ReplicaLog, log_folder: Path) -> None:
    append(log, ["secret-id", "b", None])
    erase(log, [0])
    append(log, ["c"])
    assert not [path for path in log_folder.iterdir() if b"secret-id" in path.read_bytes()]
    assert offsets_of(log, ["secret-id", "b", "c", "d"]) == [0, 1, 3, NEW]
    append(log, ["later"], BEGAN_US + int(WINDOW_S * SECOND_US) + 1)
    log.ids.expire()
    assert not (log_folder / "ids").exists(), "until the window ends"


def test_messages_without_ids_do_not_count(log: ReplicaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """They once pushed ids out: as many messages were read as the table holds ids."""
    monkeypatch.setattr(stored_ids, "MAX_IDS", 100)
    append(log, ["first"])
    for _ in range(60):
        append(log, [None] * 10)
    assert offsets_of(log, ["first"]) == [0]


def test_as_many_ids_as_the_window_holds_are_read_and_it_says_from_when(
    log: ReplicaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_ids, "MAX_IDS", 100)
    texts = [f"id-{at}" for at in range(1000)]
    for at in range(0, 1000, 10):
        append(log, texts[at : at + 10], BEGAN_US + at)
    found = offsets_of(log, texts, BEGAN_US + 1000)
    assert found[-100:] == list(range(900, 1000))
    assert found[0] == NEW, "not the whole log was read"
    window, _ = rebuilt_dedupe(WINDOW_S, log)
    known_from = next(at for at, offset in enumerate(found) if offset != NEW) // 10 * 10
    assert window.known_from_us == BEGAN_US + known_from
    assert window.shortened_to_us(BEGAN_US + 1000) == 1000 - known_from


def test_kept_ids_are_bounded(log: ReplicaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_ids, "MAX_IDS", 100)
    texts = [f"id-{at}" for at in range(1000)]
    for at in range(0, 1000, 10):
        append(log, texts[at : at + 10], BEGAN_US + at)
    log.upkeep.drop_before(1000)
    assert len(log.ids.kept.read().offsets) == 100
    assert log.ids.kept.read().offsets[-1] == log.log_start_offset - 1


def test_a_log_that_begins_at_its_leaders_start_adopts_the_leaders_ids(log: ReplicaLog, tmp_path: Path) -> None:
    texts = [f"id-{at}" for at in range(300)]
    for at in range(0, 300, 10):
        append(log, texts[at : at + 10])
    log.upkeep.drop_before(250)
    follower = open_log(tmp_path / "follower", SMALL)
    follower.ids.adopt(StoredIds.from_bytes(log.ids.kept.read().to_bytes()))
    follower.begin_at(log.log_start_offset, Epoch(1))
    assert offsets_of(follower, texts[: log.log_start_offset]) == list(range(log.log_start_offset))
    follower.close()


def test_ids_that_cannot_be_kept_because_the_disk_is_full_do_not_stop_what_makes_room(
    log: ReplicaLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    for at in range(30):
        append(log, [f"id-{at}"] * 10)
    monkeypatch.setattr(stored_ids, "write_checked", full)
    assert log.upkeep.drop_before(200)
    assert "could not be kept" in caplog.text


def test_damaged_ids_are_told_and_replaced(log: ReplicaLog, log_folder: Path) -> None:
    for at in range(30):
        append(log, [f"id-{at}-{row}" for row in range(10)])
    log.upkeep.drop_before(100)
    path = log_folder / "ids"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    window, damage = rebuilt_dedupe(WINDOW_S, log)
    assert damage is not None
    assert "ids" in damage.message
    assert window.find(np.array([[1, 1]], np.uint64), BEGAN_US)[0] == NEW
    log.upkeep.drop_before(200)
    assert rebuilt_dedupe(WINDOW_S, log)[1] is None


Step = tuple[str, int]
steps = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 30)),
    st.tuples(st.just("plain"), st.integers(1, 30)),
    st.tuples(st.just("wait"), st.integers(1, 90)),
    st.tuples(st.sampled_from(["roll", "seal", "drop", "erase", "reopen", "move", "expire"]), st.integers(0, 100)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, min_size=5, max_size=40))
def test_no_way_of_removal_forgets_an_id_within_the_window(
    tmp_path_factory: pytest.TempPathFactory, script: list[Step]
) -> None:
    """Compared with a table that never forgets."""
    folder, moves = tmp_path_factory.mktemp("model"), 0
    log, now_us = open_log(folder / "0", SMALL), BEGAN_US
    stored: dict[str, tuple[int, int]] = {}
    try:
        for what, number in script:
            match what:
                case "append":
                    texts = [f"{len(stored)}.{row}" for row in range(number)]
                    base = append(log, list(texts), now_us)
                    stored |= {text: (base + row, now_us) for row, text in enumerate(texts)}
                case "plain":
                    append(log, [None] * number, now_us)
                case "wait":
                    now_us += number * SECOND_US
                case "roll":
                    log.roll()
                case "seal":
                    log.upkeep.seal_next()
                case "drop":
                    log.upkeep.drop_before(log.log_end_offset * number // 100)
                case "erase" if log.log_end_offset > log.log_start_offset:
                    first = log.log_start_offset + (log.log_end_offset - log.log_start_offset) * number // 101
                    erase(log, [first])
                case "reopen":
                    log.close()
                    log = open_log(log.folder, SMALL)
                case "move":
                    moves += 1
                    log = moved(log, folder / str(moves))
                case "expire":
                    log.ids.expire()
            texts = list(stored)
            if texts:
                found = offsets_of(log, texts, now_us)
                wanted = [at if now_us - then < WINDOW_S * SECOND_US else NEW for at, then in stored.values()]
                assert found == wanted, what
    finally:
        log.close()


def moved(log: ReplicaLog, folder: Path) -> ReplicaLog:
    """To an empty broker, as a follower copies it: the ids that the leader keeps, then what its files have."""
    from natslog.arrow import ipc
    from natslog.log.batch_encoder import EncodedBatch
    from natslog.node.replicas.fetch_sessions import records_from

    copy = open_log(folder, SMALL)
    copy.ids.adopt(log.ids.kept.read())
    if log.log_start_offset:
        copy.begin_at(log.log_start_offset, Epoch(1))
    while copy.log_end_offset < log.log_end_offset:
        for data in records_from(log, copy.log_end_offset, 1 << 20):
            batches = [EncodedBatch(header, [message]) for header, message in ipc.split_messages(data, source="test")]
            copy.append_copies(batches)
    log.close()
    return copy


def test_a_serial_is_never_used_again_so_that_a_follower_takes_over_what_was_added_since(tmp_path: Path) -> None:
    kept = KeptIds(tmp_path)
    one = StoredIds(np.ones((1, 2), np.uint64), np.zeros(1, np.int64), np.ones(1, np.int64))
    kept.add(one, 0)
    first = kept.serial
    kept.expire(2)
    assert kept.serial == 0
    kept.add(one, 0)
    assert kept.serial not in (0, first)
