"""Kernels on message ids: hashing, and tables of what is stored (open addressing, linear probing)."""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled


@compiled
def hash_ids(buffer: Any, starts: Any, lengths: Any, out: Any) -> None:
    """128 bits of each text as two uint64 (FNV-1a from two bases, mixed): equal texts, equal rows; length -1: zeros.

    Source: Fowler, Noll, Vo, "FNV-1a"; the finaliser is MurmurHash3's fmix64.
    """
    prime = np.uint64(1099511628211)
    for index in range(starts.shape[0]):
        if lengths[index] < 0:
            out[index, 0] = np.uint64(0)
            out[index, 1] = np.uint64(0)
            continue
        for half in range(2):
            value = np.uint64(14695981039346656037) if half == 0 else np.uint64(0x9AE16A3B2F90404F)
            for at in range(starts[index], starts[index] + lengths[index]):
                value = (value ^ np.uint64(buffer[at])) * prime
            value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
            value = (value ^ (value >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
            value = value ^ (value >> np.uint64(33))
            out[index, half] = value if value != np.uint64(0) else np.uint64(1)


@compiled
def find_ids(table: Any, offsets: Any, times: Any, oldest: int, ids: Any, found: Any) -> None:
    """`found[i]` becomes the offset stored for `ids[i]`, or stays as it is: where there is none, or one with an earlier
    time than `oldest`. Open addressing, linear probing.
    """
    mask = np.uint64(table.shape[0] - 1)
    for index in range(ids.shape[0]):
        if ids[index, 0] == np.uint64(0):
            continue
        slot = ids[index, 0] & mask
        while table[slot, 0] != np.uint64(0):
            if table[slot, 0] == ids[index, 0] and table[slot, 1] == ids[index, 1]:
                if times[slot] >= oldest:
                    found[index] = offsets[slot]
                break
            slot = (slot + np.uint64(1)) & mask


@compiled
def mark_repeated(ids: Any, found: Any, slots: Any, new: int, repeated: int) -> None:
    """Of the ids that are `new` in `found`, the second and later ones of each become `repeated`.

    Args:
        slots: an empty table (filled with -1) of a power of two, at least twice as many as there are ids.
    """
    mask = np.uint64(slots.shape[0] - 1)
    for index in range(ids.shape[0]):
        if ids[index, 0] == np.uint64(0) or found[index] != new:
            continue
        slot = ids[index, 0] & mask
        while slots[slot] >= 0:
            first = slots[slot]
            if ids[first, 0] == ids[index, 0] and ids[first, 1] == ids[index, 1]:
                found[index] = repeated
                break
            slot = (slot + np.uint64(1)) & mask
        if slots[slot] < 0:
            slots[slot] = index


@compiled
def insert_ids(table: Any, offsets: Any, times: Any, window: int, ids: Any, at_offsets: Any, at_times: Any) -> int:
    """Stores `ids[i]` → `at_offsets[i]`, `at_times[i]` where it is not there yet, or is older by `window` or more; the
    caller ensures that there is space. Returns how many are new.
    """
    mask = np.uint64(table.shape[0] - 1)
    added = 0
    for index in range(ids.shape[0]):
        if ids[index, 0] == np.uint64(0):
            continue
        slot = ids[index, 0] & mask
        while table[slot, 0] != np.uint64(0):
            if table[slot, 0] == ids[index, 0] and table[slot, 1] == ids[index, 1]:
                break
            slot = (slot + np.uint64(1)) & mask
        is_new = table[slot, 0] == np.uint64(0)
        if is_new or times[slot] <= at_times[index] - window:
            table[slot, 0] = ids[index, 0]
            table[slot, 1] = ids[index, 1]
            offsets[slot] = at_offsets[index]
            times[slot] = at_times[index]
            added += is_new
    return added


@compiled
def pack_id(buffer: Any, start: int, end: int, letters: Any, packed: Any, row: int) -> bool:
    """Packs the id of natslog's own form in `buffer[start:end]` into the 12 bytes `packed[row]`: four letters into
    three bytes. False where it has another form; then these bytes are zeros.

    Args:
        letters: the value of each letter of the alphabet of 64 by its code; 255 for other bytes.
    """
    if end - start != 17 or buffer[start] != 126:
        return False
    some = np.int64(0)
    for group in range(4):
        value, at = np.int64(0), start + 1 + 4 * group
        for place in range(4):
            digit = np.int64(letters[buffer[at + place]])
            if digit > 63:
                packed[row, :] = 0
                return False
            value |= digit << (6 * place)
        some |= value
        for place in range(3):
            packed[row, 3 * group + place] = (value >> (8 * place)) & 255
    return bool(some != 0)


@compiled
def unpack_ids(packed: Any, alphabet: Any, out: Any) -> None:
    """The 17 letters of each packed id, one after another."""
    at = 0
    for row in range(packed.shape[0]):
        out[at] = 126
        at += 1
        for group in range(4):
            value = np.int64(0)
            for place in range(3):
                value |= np.int64(packed[row, 3 * group + place]) << (8 * place)
            for place in range(4):
                out[at] = alphabet[(value >> (6 * place)) & 63]
                at += 1
