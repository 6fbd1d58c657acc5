"""The metadata state machine: deterministic, idempotent, and nothing changes on refusal."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from natslog.cluster.metadata import (
    BuryStream,
    CreateStream,
    DeleteStream,
    EditStream,
    Metadata,
    PauseStream,
)
from natslog.errors import CorruptLog, DataDirError, InvalidRequest, StreamConflict, StreamNotFound
from natslog.model import StreamSettings
from natslog.node.metadata_store import MetadataStore


def create(name: str = "orders", stream_id: str = "aa", **settings: object) -> CreateStream:
    wanted = StreamSettings(subject="orders.>", **settings)
    return CreateStream(name=name, id=stream_id, settings=wanted, created_us=1, placement=(1,))


def test_create_again_with_the_same_settings_changes_nothing() -> None:
    state = Metadata(cluster_id="c")
    assert state.apply(create())
    before = copy.deepcopy(state)
    assert not state.apply(create(stream_id="bb"))
    assert state == before
    assert state.stream("orders").id == "aa"


def test_create_with_other_settings_is_a_conflict_that_names_them() -> None:
    state = Metadata(cluster_id="c")
    state.apply(create())
    with pytest.raises(StreamConflict) as conflict:
        state.apply(create(max_bytes=5, max_age_s=60.0))
    assert conflict.value.facts["settings"] == ["max_age", "max_bytes"]
    assert state.version == 1


def test_deleted_stream_leaves_a_tombstone_and_its_id_is_never_used_again() -> None:
    state = Metadata(cluster_id="c")
    state.apply(create())
    state.apply(DeleteStream(name="orders", deleted_us=2))
    assert "aa" in state.tombstones
    with pytest.raises(StreamNotFound):
        state.stream("orders")
    with pytest.raises(InvalidRequest):
        state.apply(create(stream_id="aa"))
    assert state.apply(create(stream_id="bb"))
    assert state.apply(BuryStream(id="aa"))
    assert not state.apply(BuryStream(id="aa"))


def test_edit_and_pause_change_only_what_they_name() -> None:
    state = Metadata(cluster_id="c")
    state.apply(create(group="g"))
    settings = msgspec.structs.replace(state.stream("orders").settings, max_messages=9)
    assert state.apply(EditStream(name="orders", settings=settings))
    assert state.apply(PauseStream(name="orders", paused=True))
    assert not state.apply(PauseStream(name="orders", paused=True))
    record = state.stream("orders")
    assert (record.settings.max_messages, record.paused, record.id) == (9, True, "aa")
    with pytest.raises(InvalidRequest):
        state.apply(EditStream(name="orders", settings=msgspec.structs.replace(settings, group="h")))


def test_store_keeps_what_was_applied(tmp_path: Path) -> None:
    store = MetadataStore(tmp_path / "metadata", "c")
    store.propose(create())
    store.propose(create("returns", "bb"))
    assert MetadataStore(tmp_path / "metadata", "c").state == store.state


def test_store_refused_command_writes_nothing(tmp_path: Path) -> None:
    store = MetadataStore(tmp_path / "metadata", "c")
    store.propose(create())
    before = (tmp_path / "metadata").read_bytes()
    with pytest.raises(StreamConflict):
        store.propose(create(max_bytes=5))
    assert (tmp_path / "metadata").read_bytes() == before


def test_store_with_any_byte_damaged_or_cut_stops_rather_than_forgets(tmp_path: Path) -> None:
    path = tmp_path / "metadata"
    MetadataStore(path, "c").propose(create())
    original = path.read_bytes()
    for position in range(len(original)):
        damaged = bytearray(original)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises((CorruptLog, DataDirError)):
            MetadataStore(path, "c")
        path.write_bytes(original[:position])
        with pytest.raises(CorruptLog):
            MetadataStore(path, "c")


def test_store_commands_of_several_threads_all_count(tmp_path: Path) -> None:
    store = MetadataStore(tmp_path / "metadata", "c")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda at: store.propose(create(f"s{at}", f"{at:02x}")), range(40)))
    assert len(MetadataStore(tmp_path / "metadata", "c").state.streams) == 40


def test_replicas_are_not_declared_by_an_edit() -> None:
    state = Metadata(cluster_id="c")
    state.apply(create())
    for name in ("replicas", "min_isr"):
        settings = msgspec.structs.replace(state.stream("orders").settings, **{name: 3})
        with pytest.raises(InvalidRequest, match=name):
            state.apply(EditStream(name="orders", settings=settings))
