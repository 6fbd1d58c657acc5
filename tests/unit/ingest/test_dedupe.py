"""The deduplication window against a dictionary."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.schema import HEADERS_TYPE
from natslog.ingest import dedupe
from natslog.ingest.dedupe import DedupeWindow
from natslog.wire import kernels_ids
from natslog.wire.message_ids import ids_of_headers


def hashed(texts: list[str | None]) -> np.ndarray:
    data = "".join(text or "" for text in texts).encode()
    lengths = np.array([-1 if text is None else len(text.encode()) for text in texts], np.int64)
    starts = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0))[:-1]]).astype(np.int64)
    out = np.zeros((len(texts), 2), np.uint64)
    kernels_ids.hash_ids(np.frombuffer(data or b"\0", np.uint8), starts, lengths, out)
    return out


texts = st.none() | st.text(st.sampled_from("abc"), max_size=2)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.lists(texts, min_size=1, max_size=40), max_size=30))
def test_within_the_window_every_id_is_stored_once(commits: list[list[str | None]]) -> None:
    window, model, offset = DedupeWindow(10.0), {}, 0
    for texts_of_commit in commits:
        ids = hashed(texts_of_commit)
        found, seen = window.find(ids, 0), set()
        for at, text in enumerate(texts_of_commit):
            if text is None:
                assert found[at] == -1
            elif text in model:
                assert found[at] == model[text]
            else:
                assert found[at] == (-2 if text in seen else -1)
                seen.add(text)
        fresh = found == -1
        offsets = np.arange(offset, offset + fresh.sum())
        window.remember(ids[fresh], offsets, 0)
        stored = zip(np.array(texts_of_commit, object)[fresh], offsets, strict=True)
        model |= {text: at for text, at in stored if text is not None}
        offset += int(fresh.sum())


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 3_000_000),
    st.lists(st.tuples(st.integers(0, 2_500_000), st.lists(texts, min_size=1, max_size=8)), max_size=30),
)
def test_an_id_is_found_for_the_window_and_no_longer(
    began_us: int, commits: list[tuple[int, list[str | None]]]
) -> None:
    """By the timestamps alone: a second window, filled late from what was stored, finds the same."""
    window_us = 1_000_000
    window, stored, time_us = DedupeWindow(1.0), [], began_us
    for pause_us, texts_of_commit in commits:
        time_us += pause_us
        ids = hashed(texts_of_commit)
        found = window.find(ids, time_us)
        successors = DedupeWindow(1.0)
        for earlier, offsets, timestamp_us in stored:
            successors.remember_stored(earlier, offsets, np.full(len(offsets), timestamp_us))
        assert (successors.find(ids, time_us) == found).all()
        for at, text in enumerate(texts_of_commit):
            ages = [
                time_us - one for ids_then, _, one in stored if text is not None and (ids_then == ids[at]).all(1).any()
            ]
            assert (found[at] >= 0) == (bool(ages) and min(ages) < window_us)
        fresh = found == -1
        offsets = np.arange(len(stored) * 100, len(stored) * 100 + fresh.sum())
        window.remember(ids[fresh], offsets, time_us)
        if fresh.any():
            stored.append((ids[fresh], offsets, time_us))


def test_rows_of_one_stored_batch_count_from_their_own_timestamps() -> None:
    window, ids = DedupeWindow(1.0), hashed(["a", "b", "c"])
    window.remember_stored(ids, np.arange(3), np.array([500_000, 1_600_000, 2_500_000]))
    assert window.find(ids, 2_500_000).tolist() == [-1, 1, 2]


@pytest.mark.parametrize("began_us", [0, 1, 700_000, 999_999])
def test_id_is_found_until_the_window_ends_and_then_stored_anew(began_us: int) -> None:
    window, ids = DedupeWindow(1.0), hashed(["a"])
    window.remember(ids, np.array([5]), began_us)
    assert window.find(ids, began_us + 999_999)[0] == 5
    assert window.find(ids, began_us + 1_000_000)[0] == -1
    window.remember(ids, np.array([6]), began_us + 1_000_000)
    assert window.find(ids, began_us + 1_999_999)[0] == 6


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedupe, "MAX_IDS", 1000)
    window = DedupeWindow(1e6)
    for start in range(0, 20_000, 500):
        window.remember(hashed([f"id-{at}" for at in range(start, start + 500)]), np.arange(500), start)
    assert window.shortened_to_us(20_000) == 20_000 - window.known_from_us
    assert 1000 <= 20_000 - window.known_from_us <= 2000, "the newest ids are known in any case"
    assert window.find(hashed([f"id-{at}" for at in range(19_000, 20_000)]), 20_000).min() >= 0
    assert window._present.count + window._before.count <= 3000
    assert window.find(hashed(["id-19999"]), 20_000)[0] == 499


def test_ids_rebuilt_from_stored_headers_equal_those_at_ingest() -> None:
    headers = pa.array(
        [
            None,
            [],
            [{"key": "Nats-Msg-Id", "value": "one"}],
            [{"key": "X", "value": "y"}, {"key": "Nats-Msg-Id", "value": "zwei"}],
        ],
        HEADERS_TYPE,
    )
    assert (ids_of_headers(headers) == hashed([None, None, "one", "zwei"])).all()
    assert ids_of_headers(headers.slice(0, 2)) is None
    assert (ids_of_headers(headers.slice(2)) == hashed(["one", "zwei"])).all()


def test_ids_under_null_lists_are_nobodys() -> None:
    """A null list may have items in Arrow, which readers must not see."""
    pairs = pa.array([{"key": "Nats-Msg-Id", "value": "hidden"}, {"key": "Nats-Msg-Id", "value": "b"}])
    headers = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pairs, mask=pa.array([True, False]))
    ids = ids_of_headers(headers)
    assert ids is not None
    assert not ids[0].any()
    plain = ids_of_headers(pa.array([None, [{"key": "Nats-Msg-Id", "value": "b"}]], HEADERS_TYPE))
    assert plain is not None
    assert (ids == plain).all()
