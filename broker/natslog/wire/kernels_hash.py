"""Kernels that hash rows: each text of a row is mixed into the row's two words.

Source of the mixing: XXH64 by Yann Collet, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md: one word by
the rounds of its accumulators, the other by the steps of its tail. The finaliser is MurmurHash3's fmix64. This is no
cryptographic hash: with the start of a row's words, rows of the same hash can be constructed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled, copy_bytes, inlined

_P1, _P2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_ABSENT = np.uint64(0xFFFFFFFFFFFFFFFF)


@inlined
def _rotated(value: Any, left: int) -> Any:
    return (value << np.uint64(left)) | (value >> np.uint64(64 - left))


@inlined
def _mixed(value: Any) -> Any:
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


@compiled
def mix_texts(offsets: Any, data: Any, present: Any, word: Any, word_bytes: Any, hashes: Any) -> None:
    """`hashes[i]` takes in text i and its length, or that there is none.

    Args:
        present: marks; empty where every row has a text. `word`, `word_bytes`: the same eight bytes, to work with.
    """
    for index in range(hashes.shape[0]):
        first, second = hashes[index, 0], hashes[index, 1]
        at, end = np.int64(offsets[index]), np.int64(offsets[index + 1])
        length = np.uint64(end - at)
        if present.shape[0] > 0 and not present[index]:
            at, length = end, _ABSENT
        while at < end:
            size = min(np.int64(8), end - at)
            if size < 8:
                word[0] = np.uint64(0)
            copy_bytes(data, at, size, word_bytes, 0)
            value = word[0] * _P2
            first = _rotated(first + value, 31) * _P1
            second = _rotated(second ^ (_rotated(value, 31) * _P1), 27) * _P1 + _P4
            at += size
        value = length * _P2
        hashes[index, 0] = _rotated(first + value, 31) * _P1
        hashes[index, 1] = _rotated(second ^ (_rotated(value, 31) * _P1), 27) * _P1 + _P4


@compiled
def mix_items(edges: Any, present: Any, items: Any, hashes: Any) -> None:
    """`hashes[i]` takes in the hashes of its items `[edges[i], edges[i + 1])`, in order, and how many they are."""
    for index in range(hashes.shape[0]):
        first, second = hashes[index, 0], hashes[index, 1]
        for at in range(edges[index], edges[index + 1]):
            first = _rotated(first + items[at, 0] * _P2, 31) * _P1
            second = _rotated(second ^ (_rotated(items[at, 1] * _P2, 31) * _P1), 27) * _P1 + _P4
        count = np.uint64(edges[index + 1] - edges[index]) if present[index] else _ABSENT
        hashes[index, 0] = _rotated(first + count * _P2, 31) * _P1
        hashes[index, 1] = _rotated(second ^ (_rotated(count * _P2, 31) * _P1), 27) * _P1 + _P4


@compiled
def finish_hashes(hashes: Any) -> None:
    """Every bit of a row's words then depends on all of its texts."""
    for index in range(hashes.shape[0]):
        first, second = hashes[index, 0], hashes[index, 1]
        hashes[index, 0] = _mixed(first + _rotated(second, 32))
        hashes[index, 1] = _mixed(second + _rotated(first, 17))


@compiled
def hashes_as_texts(hashes: Any, alphabet: Any, out: Any) -> None:
    """96 bits of each hash as `~` and 16 letters of the alphabet of 64: ten of the first word, six of the second."""
    at = 0
    for index in range(hashes.shape[0]):
        out[at] = 126
        at += 1
        for half, letters in ((0, 10), (1, 6)):
            value = hashes[index, half]
            for _ in range(letters):
                out[at] = alphabet[value & np.uint64(63)]
                value >>= np.uint64(6)
                at += 1
