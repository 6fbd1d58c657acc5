"""The newest rows of each text are those that a dictionary of lists has."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.log.newest import NewestRows, Texts

TEXTS = st.lists(st.one_of(st.none(), st.text(max_size=20), st.sampled_from(["a", "b", "c"])), max_size=40)
STEPS = st.lists(st.one_of(TEXTS, st.integers(1, 4), st.just("store")), max_size=12)


def stored(table: NewestRows) -> NewestRows:
    return NewestRows.from_arrays(table.limit, {name: one.tobytes() for name, one in table.to_arrays().items()})


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
