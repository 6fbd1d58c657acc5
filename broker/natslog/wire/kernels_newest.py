"""Kernels on the newest rows of each text (subject or key): a hash table of texts, each with a queue of offsets.

A table consists of arrays. `slots`: open addressing with linear probing; a row of it is the hash of a text and the
number of its entry plus one (0: free). A row of `entries` has where its text begins in `texts`, the length of the text,
how many offsets are kept, the newest of them, and, where a text may keep several, the first and the last node of its
queue of offsets: nodes of `node_offsets` and `node_nexts`. `state`: how many entries, bytes of texts and nodes are
used, and the first free node of a list (-1: none). One row of an array is one line of the processor's cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled, copy_bytes
from natslog.wire.newest_layout import (
    COUNT,
    ENTRIES,
    FREE_NODE,
    HEAD,
    LENGTH,
    NEWEST,
    NODES,
    START,
    TAIL,
    TEXT_BYTES,
)


@compiled
def text_hash(data: Any, start: Any, end: Any, word: Any, word_bytes: Any) -> Any:
    """Eight bytes a step, as the tail of XXH64; the finaliser is MurmurHash3's fmix64."""
    value = np.uint64(end - start) * np.uint64(0x9E3779B185EBCA87)
    at = start
    while at < end:
        size = min(np.int64(8), end - at)
        if size < 8:
            word[0] = np.uint64(0)
        copy_bytes(data, at, size, word_bytes, 0)
        mixed = word[0] * np.uint64(0xC2B2AE3D27D4EB4F)
        mixed = ((mixed << np.uint64(31)) | (mixed >> np.uint64(33))) * np.uint64(0x9E3779B185EBCA87)
        value = value ^ mixed
        value = ((value << np.uint64(27)) | (value >> np.uint64(37))) * np.uint64(0x9E3779B185EBCA87)
        value = value + np.uint64(0x85EBCA77C2B2AE63)
        at += size
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


@compiled
def find_text(data: Any, start: Any, end: Any, value: Any, slots: Any, entries: Any, texts: Any) -> Any:
    """The slot of this text, of this hash: its own, or the free one where it belongs."""
    mask = np.uint64(slots.shape[0] - 1)
    slot = value & mask
    length = end - start
    while slots[slot, 1] != 0:
        if slots[slot, 0] == value:
            entry = np.int64(slots[slot, 1]) - 1
            if entries[entry, LENGTH] == length:
                stored = entries[entry, START]
                same = True
                for at in range(length):
                    if texts[stored + at] != data[start + at]:
                        same = False
                        break
                if same:
                    return np.int64(slot)
        slot = (slot + np.uint64(1)) & mask
    return np.int64(slot)


@compiled
def drop_oldest(
    limit: int, entry: int, entries: Any, node_offsets: Any, node_nexts: Any, state: Any, superseded: Any, found: int
) -> int:
    """The entry keeps `limit` offsets at most; what it drops is appended to `superseded`. Returns its new length."""
    while entries[entry, COUNT] > limit:
        oldest = entries[entry, HEAD]
        superseded[found] = node_offsets[oldest]
        found += 1
        entries[entry, HEAD] = node_nexts[oldest]
        entries[entry, COUNT] -= 1
        node_nexts[oldest] = state[FREE_NODE]
        state[FREE_NODE] = oldest
    return found


@compiled
def note_rows(
    offsets: Any,
    data: Any,
    present: Any,
    rows: Any,
    limit: int,
    slots: Any,
    entries: Any,
    texts: Any,
    node_offsets: Any,
    node_nexts: Any,
    state: Any,
    word: Any,
    word_bytes: Any,
    superseded: Any,
) -> int:
    """Adds rows with ascending offsets `rows`; their texts are `data[offsets[i]:offsets[i + 1]]`. The caller ensures
    that there is room for a new entry, and a new node if `limit` is more than one, for each of them.

    Args:
        present: marks of the rows that have a text; empty: all have. `limit`: how many offsets a text keeps.
        superseded: takes the offsets that no text keeps any more.

    Returns:
        How many these are.
    """
    found = 0
    for index in range(rows.shape[0]):
        if present.shape[0] > 0 and not present[index]:
            continue
        start, end = np.int64(offsets[index]), np.int64(offsets[index + 1])
        value = text_hash(data, start, end, word, word_bytes)
        slot = find_text(data, start, end, value, slots, entries, texts)
        if slots[slot, 1] == 0:
            entry = state[ENTRIES]
            state[ENTRIES] += 1
            slots[slot, 0] = value
            slots[slot, 1] = entry + 1
            copy_bytes(data, start, end - start, texts, state[TEXT_BYTES])
            entries[entry, START] = state[TEXT_BYTES]
            entries[entry, LENGTH] = end - start
            entries[entry, COUNT] = 0
            state[TEXT_BYTES] += end - start
        else:
            entry = np.int64(slots[slot, 1]) - 1
        if limit == 1:
            if entries[entry, COUNT] == 1:
                superseded[found] = entries[entry, NEWEST]
                found += 1
            entries[entry, COUNT] = 1
            entries[entry, NEWEST] = rows[index]
            continue
        entries[entry, NEWEST] = rows[index]
        node = state[FREE_NODE]
        if node >= 0:
            state[FREE_NODE] = node_nexts[node]
        else:
            node = state[NODES]
            state[NODES] += 1
        node_offsets[node] = rows[index]
        node_nexts[node] = -1
        if entries[entry, COUNT] == 0:
            entries[entry, HEAD] = node
        else:
            node_nexts[entries[entry, TAIL]] = node
        entries[entry, TAIL] = node
        entries[entry, COUNT] += 1
        found = drop_oldest(limit, entry, entries, node_offsets, node_nexts, state, superseded, found)
    return found


@compiled
def shorten_queues(limit: int, entries: Any, node_offsets: Any, node_nexts: Any, state: Any, superseded: Any) -> int:
    """Every text keeps `limit` offsets at most from now on. As `note_rows`; `superseded` has room for all nodes."""
    found = 0
    for entry in range(state[ENTRIES]):
        found = drop_oldest(limit, entry, entries, node_offsets, node_nexts, state, superseded, found)
    return found


@compiled
def make_queues(entries: Any, node_offsets: Any, node_nexts: Any, state: Any) -> None:
    """Of a table whose texts kept one offset each: each has a queue of one node from now on."""
    for entry in range(state[ENTRIES]):
        node_offsets[entry] = entries[entry, NEWEST]
        node_nexts[entry] = -1
        entries[entry, HEAD] = entry
        entries[entry, TAIL] = entry
    state[NODES] = state[ENTRIES]


@compiled
def place_texts(texts: Any, entries: Any, count: int, slots: Any, word: Any, word_bytes: Any) -> None:
    """Fills empty slots with the first `count` entries."""
    mask = np.uint64(slots.shape[0] - 1)
    for entry in range(count):
        start = entries[entry, START]
        value = text_hash(texts, start, start + entries[entry, LENGTH], word, word_bytes)
        slot = value & mask
        while slots[slot, 1] != 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot, 0] = value
        slots[slot, 1] = entry + 1


@compiled
def look_up_texts(
    offsets: Any, data: Any, slots: Any, entries: Any, texts: Any, word: Any, word_bytes: Any, found: Any
) -> None:
    """`found[i]` becomes the entry of text i, or -1."""
    for index in range(found.shape[0]):
        start, end = np.int64(offsets[index]), np.int64(offsets[index + 1])
        value = text_hash(data, start, end, word, word_bytes)
        slot = find_text(data, start, end, value, slots, entries, texts)
        found[index] = np.int64(slots[slot, 1]) - 1


@compiled
def newest_of_texts(
    offsets: Any, data: Any, slots: Any, entries: Any, texts: Any, word: Any, word_bytes: Any, found: Any
) -> None:
    """`found[i]` becomes the newest offset of text i, or -1."""
    look_up_texts(offsets, data, slots, entries, texts, word, word_bytes, found)
    for index in range(found.shape[0]):
        if found[index] >= 0:
            found[index] = entries[found[index], NEWEST]
