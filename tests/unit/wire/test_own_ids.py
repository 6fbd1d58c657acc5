"""Message ids of natslog's own form: packed where they are stored, and the same ids when they are read back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.wire import native
from natslog.wire.own_ids import ALPHABET, ID_LETTERS, LETTER_VALUES, PACKED_BYTES, PackedIds, hashed, unpacked

LETTERS = ALPHABET.tobytes().decode()
NO_ID = b"~" + b"a" * 16


def packed(*texts: bytes) -> PackedIds:
    """What ingest stores of messages with these ids."""
    header = [b"NATS/1.0\r\nNats-Msg-Id:" + text + b"\r\n\r\n" for text in texts]
    edges = np.cumsum([0, *map(len, header)])
    frames = np.zeros((len(texts), 10), np.int64)
    frames[:, 7], frames[:, 8] = np.diff(edges), edges[1:]
    ids = np.zeros((len(texts), PACKED_BYTES), np.uint8)
    pairs, places = np.zeros((4, 2 * len(texts)), np.int64), np.zeros((2, len(texts)), np.int64)
    words = (np.frombuffer(b"Natslog-Key", np.uint8), np.frombuffer(b"Nats-Msg-Id", np.uint8))
    native.split_headers(
        np.frombuffer(b"".join(header), np.uint8), frames, *words, pairs, np.zeros(len(texts) + 1, np.int64),
        places.copy(), places, LETTER_VALUES, ids, words[0], places.copy(),
        words[0][:0], np.zeros(len(texts), np.bool_), words[0], np.zeros(len(texts), np.bool_),
    )  # fmt: skip
    return ids


def texts_of(ids: PackedIds) -> list[bytes]:
    return [row.tobytes() for row in unpacked(ids).reshape(-1, ID_LETTERS)]


@settings(deadline=None)
@given(st.lists(st.text(LETTERS, min_size=16, max_size=16).map(lambda text: b"~" + text.encode()), min_size=1))
def test_packed_ids_are_the_same_texts_and_have_the_same_hashes(texts: list[bytes]) -> None:
    ids = packed(*texts)
    assert texts_of(ids) == texts
    data = np.frombuffer(b"".join(texts), np.uint8)
    starts = np.arange(0, len(data), ID_LETTERS, dtype=np.int64)
    expected = np.zeros((len(texts), 2), np.uint64)
    native.hash_ids(data, starts, np.where(np.array(texts) == NO_ID, -1, ID_LETTERS), expected)
    assert hashed(ids).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "other",
    [
        b"~abcdefghijklmno",
        b"~abcdefghijklmnopq",
        b"abcdefghijklmnopq",
        b"~abcdefghijklmn.p",
        b"~abcdefghijklmno~",
        b"~ab cdefghijklmno",
        "~abcdefghijklmn\u00e4".encode(),
        NO_ID,
        b"",
    ],
)
def test_ids_of_another_form_are_not_packed(other: bytes) -> None:
    own = b"~ABCDEFGHIJKLMNOP"
    assert texts_of(packed(own, other, own)) == [own, NO_ID, own]
    assert hashed(packed(other)).tolist() == [[0, 0]]
