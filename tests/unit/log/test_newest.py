"""The newest rows of each text are those that a dictionary of lists has."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.log.newest import NewestRows, Texts
from natslog.wire.newest_layout import COUNT, HEAD, NEWEST, TAIL

TEXTS = st.lists(st.one_of(st.none(), st.text(max_size=20), st.sampled_from(["a", "b", "c"])), max_size=40)
STEPS = st.lists(st.one_of(TEXTS, st.integers(1, 4), st.just("store")), max_size=12)


_UNUSED = {1: 3, 2: 6}  # from this field of an entry on, by limit: without queues there are no places in them


def stored(table: NewestRows) -> NewestRows:
    return NewestRows.from_arrays(table.limit, {name: one.tobytes() for name, one in table.to_arrays().items()})


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("name", ["entries", "texts", "node_offsets", "node_nexts", "state"])
def test_stored_table_that_leads_out_of_its_arrays_is_refused(limit: int, name: str) -> None:
    """Compiled code would follow it: the process ended with a segmentation fault."""
    table = NewestRows(limit)
    table.add(Texts.of(pa.array(["a", "b", "a", "c"])), np.arange(4))
    arrays = {name: one.tobytes() for name, one in table.to_arrays().items()}
    whole = np.frombuffer(arrays[name], np.uint8 if name == "texts" else np.int32 if name == "node_nexts" else np.int64)
    with pytest.raises(ValueError):
        NewestRows.from_arrays(limit, arrays | {name: np.append(whole, whole[:1] if len(whole) else [0]).tobytes()})
    for at in range(len(whole)):
        if name in ("entries", "node_nexts", "state") and not (name == "entries" and at % 6 >= _UNUSED[limit]):
            if name == "entries" and at % 6 == NEWEST:
                continue  # an offset of the log
            for value in (1 << 30, -2):
                wrong = whole.copy()
                wrong[at] = value
                with pytest.raises(ValueError):
                    NewestRows.from_arrays(limit, arrays | {name: wrong.tobytes()})


@pytest.mark.parametrize("field", [HEAD, TAIL, COUNT])
def test_stored_queue_that_is_shorter_than_its_count_is_refused(field: int) -> None:
    table = NewestRows(2)
    table.add(Texts.of(pa.array(["a", "b"])), np.arange(2))
    arrays = {name: one.tobytes() for name, one in table.to_arrays().items()}
    entries = np.frombuffer(arrays["entries"], np.int64).reshape(-1, 6).copy()
    entries[1, field] = 2 if field == COUNT else -1
    with pytest.raises(ValueError):
        NewestRows.from_arrays(2, arrays | {"entries": entries.tobytes()})


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, limit=st.integers(1, 4), before=st.integers(0, 3))
def test_newest_rows_of_each_text(steps: list[list[str | None] | int | str], limit: int, before: int) -> None:
    table, queues, offset = NewestRows(limit), {}, 0
    for step in steps:
        superseded: list[int] = []
        if isinstance(step, list):
            column = pa.array([None] * before + step, pa.string())[before:]  # a slice: it does not begin at its buffers
            rows = np.arange(offset, offset + len(step))
            found = table.add(Texts.of(column), rows)
            for row, text in zip(rows.tolist(), step, strict=True):
                if text is not None:
                    queues.setdefault(text, []).append(row)
            offset += len(step)
        elif step == "store":
            table, found = stored(table), np.empty(0, np.int64)
        else:
            assert isinstance(step, int)
            limit = step
            found = table.change_limit(limit)
        for queue in queues.values():
            superseded += queue[:-limit]
            del queue[:-limit]
        assert sorted(found.tolist()) == sorted(superseded)
        assert table.kept().tolist() == sorted(row for queue in queues.values() for row in queue)
        assert table.newest().tolist() == sorted(queue[-1] for queue in queues.values())
        asked = Texts.of(pa.array([*queues, "not there"], pa.string()))
        assert table.newest_of(asked).tolist() == [*(queue[-1] for queue in queues.values()), -1]
        assert table.oldest_of(asked).tolist() == [*(queue[0] for queue in queues.values()), -1]
    assert len(table) == len(queues)


@pytest.mark.long
@pytest.mark.parametrize("limit", [1, 5])
def test_a_million_texts_take_at_most_150_bytes_each(limit: int) -> None:
    table, count = NewestRows(limit), 1_000_000
    for start in range(0, count, 50_000):
        texts = pa.array([f"sensors.site.{number}" for number in range(start, start + 50_000)])
        table.add(Texts.of(texts), np.arange(start, start + 50_000))
    assert len(table) == count
    assert table.memory_bytes <= 150 * count + (12 * count * 3 // 2 if limit > 1 else 0)
    assert table.newest_of(Texts.of(pa.array(["sensors.site.777777"]))).tolist() == [777_777]
