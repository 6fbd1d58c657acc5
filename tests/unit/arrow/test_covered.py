"""Subjects of a column that wildcards cover, compared with one subject at a time."""

from __future__ import annotations

import pyarrow as pa
import pytest

from natslog.arrow.covered import covered
from natslog.subjects import covers

LONGEST = ".".join(["*"] * 511)

PATTERNS = {
    "one": ("orders.*",),
    "a few": ("orders.eu.>", "a", "*.b"),
    "as many rules as there may be": tuple(f"orders.region-{number}.*.>" for number in range(1000)),
    "of the largest size": tuple(f"{LONGEST}.{number}" for number in range(100)),
}


@pytest.mark.long
@pytest.mark.parametrize("patterns", PATTERNS.values(), ids=PATTERNS)
def test_subjects_that_wildcards_cover(patterns: tuple[str, ...]) -> None:
    subjects = [
        "orders.eu.a",
        "orders.x",
        "a",
        "a.b",
        "a.b.c",
        "orders.region-999.a.b",
        LONGEST.replace("*", "x") + ".7",
    ]
    expected = [any(covers(pattern, subject) for pattern in patterns) for subject in subjects]
    assert covered(pa.array(subjects), patterns).to_pylist() == expected
    assert covered(pa.chunked_array([subjects, subjects]), patterns).to_pylist() == expected * 2
    assert covered(pa.array([None], pa.string()), patterns).to_pylist() == [None]
