"""Kernels for the index of subjects: rows in the order of their subjects, by counting."""

from __future__ import annotations

from typing import Any

from natslog.wire.compiled import compiled


@compiled
def count_subjects(codes: Any, ranks: Any, counts: Any) -> None:
    """Adds the rows of each subject to `counts`. `codes`: of each row; `ranks`: the number of the subject of a code."""
    for row in range(codes.shape[0]):
        counts[ranks[codes[row]]] += 1


@compiled
def place_rows(codes: Any, ranks: Any, offsets: Any, base: int, ends: Any, places: Any) -> None:
    """Puts each offset, less `base`, at the end of those of its subject: `ends`, which is moved."""
    for row in range(codes.shape[0]):
        subject = ranks[codes[row]]
        places[ends[subject]] = offsets[row] - base
        ends[subject] += 1
