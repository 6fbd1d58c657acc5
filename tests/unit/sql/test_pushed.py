"""Bounds that are found in conditions leave out no row for which the condition holds, and most of the others."""

from __future__ import annotations

import operator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.sql.pushed import columns_of, number_bounds, subject_pattern
from natslog.sql.stream_table import TABLE_SCHEMA
from natslog.subjects import covers

OFFSET, SUBJECT, VALUE = pc.field("offset"), pc.field("subject"), pc.field("value")
END = 20
COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
SUBJECTS = ("a", "a.b", "a.b.c", "a.bc", "a-b", "ä.b", "b.a", "z")


def nested(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.builds(operator.and_, inner, inner),
            st.builds(operator.or_, inner, inner),
            st.builds(operator.inv, inner),
        ),
        max_leaves=6,
    )


numbers = st.builds(lambda compare, at: compare(OFFSET, at), st.sampled_from(COMPARISONS), st.integers(-3, END + 3))
number_sets = st.lists(st.integers(0, END), min_size=1, max_size=3).map(lambda found: OFFSET.isin(found))
texts = st.builds(
    lambda compare, text: compare(SUBJECT, text), st.sampled_from(COMPARISONS), st.sampled_from((*SUBJECTS, "a.", "a/"))
)
text_sets = st.lists(st.sampled_from(SUBJECTS), min_size=1, max_size=3).map(lambda found: SUBJECT.isin(found))


def kept(condition: Any, column: str, values: list[Any]) -> list[Any]:
    table = pa.table({column: pa.array(values, TABLE_SCHEMA.field(column).type)})
    return table.filter(condition)[column].to_pylist()


@settings(deadline=None, max_examples=60)
@given(nested(numbers | number_sets))
def test_offsets_that_satisfy_a_condition_are_within_its_bounds(condition: Any) -> None:
    start, end = number_bounds(condition, TABLE_SCHEMA, "offset", 0, END)
    assert 0 <= start <= end <= END
    assert set(kept(condition, "offset", list(range(END)))) <= set(range(start, end))


@settings(deadline=None, max_examples=60)
@given(nested(texts | text_sets))
def test_subjects_that_satisfy_a_condition_are_covered_by_its_pattern(condition: Any) -> None:
    pattern = subject_pattern(condition, TABLE_SCHEMA)
    assert pattern is None or all(covers(pattern, one) for one in kept(condition, "subject", list(SUBJECTS)))


@pytest.mark.parametrize(
    ("condition", "bounds"),
    [
        ((OFFSET >= 3) & (OFFSET < 8), (3, 8)),
        ((OFFSET == 5) | (OFFSET == 9), (5, 10)),
        (OFFSET.isin([7, 4]), (4, 8)),
        (~(OFFSET < 12), (12, END)),
        (OFFSET > 100, (END, END)),
        ((OFFSET < 3) & (OFFSET > 8), None),
        (VALUE == b"x", (0, END)),
        ((OFFSET < 3) | (VALUE == b"x"), (0, END)),
    ],
    ids=str,
)
def test_bounds_of_usual_conditions_are_narrow(condition: Any, bounds: tuple[int, int] | None) -> None:
    start, end = number_bounds(condition, TABLE_SCHEMA, "offset", 0, END)
    assert (start, end) == bounds if bounds else start == end


@pytest.mark.parametrize(
    ("condition", "pattern"),
    [
        (SUBJECT == "a.b", "a.b"),
        (SUBJECT.isin(["a.b.c", "a.b.d"]), "a.b.>"),
        (SUBJECT.isin(["a.b", "a.c.d"]), "a.>"),
        (SUBJECT.isin(["a.b", "b.c"]), None),
        ((SUBJECT >= "orders.eu.") & (SUBJECT < "orders.eu/"), "orders.eu.>"),
        ((SUBJECT >= "grün.ä.") & (SUBJECT < "grün.ä/"), "grün.ä.>"),
        (SUBJECT == "not a subject", None),
        (SUBJECT == "a.*", None),
        (SUBJECT > "a.b", None),
        (VALUE == b"x", None),
    ],
    ids=str,
)
def test_patterns_of_usual_conditions(condition: Any, pattern: str | None) -> None:
    assert subject_pattern(condition, TABLE_SCHEMA) == pattern


def test_columns_of_a_condition_are_those_that_it_refers_to() -> None:
    condition = (OFFSET > 3) & (SUBJECT.isin(["a"]) | VALUE.is_valid())
    assert columns_of(condition, TABLE_SCHEMA) == {"offset", "subject", "value"}
