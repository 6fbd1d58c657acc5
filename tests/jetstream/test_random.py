"""Random sequences of requests and messages: the answers of natslog are those of JetStream, one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.jetstream.both import Api, Both, Publish, Step
from tests.jetstream.test_streams import create, info, update

MS = 1_000_000
NAMES = st.sampled_from(["A", "B", "C"])
SUBJECTS = st.sampled_from(["a.1", "a.2", "b.1", "c"])
PATTERNS = st.sampled_from(["a.1", "a.*", "b.*", ">", "c", "*.1", "none"])
SEQUENCES = st.integers(0, 12)


def some(**choices: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Any of these fields, each with one of its values."""
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in choices.items()})


CONFIGS = some(
    subjects=[["a.>"], ["a.1"], ["b.*"], ["c"], ["a.1", "c"], ["*.1"], []],
    max_msgs=[-1, 0, 1, 3, 6],
    max_bytes=[-1, 40, 90, 200],
    max_msgs_per_subject=[-1, 1, 2],
    max_msg_size=[-1, 8, 30],
    discard=["old", "new"],
    discard_new_per_subject=[False, False, True],
    storage=["file", "memory"],
    duplicate_window=[0, 60_000 * MS],
    allow_rollup_hdrs=[False, True],
    deny_delete=[False, True],
    deny_purge=[False, True],
    description=["", "text"],
    metadata=[{}, {"k": "v"}],
    first_seq=[0, 5],
    num_replicas=[0, 1, 3],
    max_consumers=[-1, 4],
    consumer_limits=[{}, {"max_ack_pending": 5}],
    allow_direct=[False, True],
    compression=["none", "s2"],
    sealed=[False, False, False, True],
    pedantic=[False, True],
)
HEADERS = some(
    **{
        "Nats-Msg-Id": ["1", "2"],
        "Nats-Expected-Stream": ["A", "B"],
        "Nats-Expected-Last-Sequence": ["0", "1", "2", "3"],
        "Nats-Expected-Last-Msg-Id": ["1", "2"],
        "Nats-Expected-Last-Subject-Sequence": ["0", "1", "2"],
        "Other": ["text"],
    }
)
ROLLUPS = st.sampled_from([{"Nats-Rollup": "sub"}, {"Nats-Rollup": "all"}, {"Nats-Rollup": "other"}])
"""Alone, and of small messages: natslog refuses one that is not permitted before it looks at other faults."""
VALUES = st.integers(0, 40).map(lambda size: b"v" * size)
PUBLISHED = st.one_of(
    st.builds(Publish, SUBJECTS, VALUES),
    st.builds(Publish, SUBJECTS, VALUES),
    st.builds(Publish, SUBJECTS, VALUES, HEADERS),
    st.builds(Publish, SUBJECTS, st.just(b""), ROLLUPS),
)
GETS = st.one_of(
    SEQUENCES.map(lambda seq: {"seq": seq}),
    PATTERNS.map(lambda pattern: {"last_by_subj": pattern}),
    st.tuples(SEQUENCES, PATTERNS).map(lambda one: {"seq": one[0], "next_by_subj": one[1]}),
)
PURGES = st.one_of(
    st.just(b""),
    st.just({"seq": 1}),
    st.integers(0, 4).map(lambda keep: {"keep": keep}),
    st.tuples(PATTERNS, st.integers(0, 3)).map(lambda one: {"filter": one[0], "keep": one[1]}),
    st.tuples(st.sampled_from(["a.1", "a.*", "b.*"]), SEQUENCES).map(lambda one: {"filter": one[0], "seq": one[1]}),
)


def of_stream(verb: str, bodies: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.tuples(NAMES, bodies).map(lambda one: Api(f"STREAM.{verb}.{one[0]}", one[1]))


STEPS = st.one_of(
    PUBLISHED,
    PUBLISHED,
    PUBLISHED,
    st.tuples(NAMES, CONFIGS).map(lambda one: create(one[0], **one[1])),
    st.tuples(NAMES, CONFIGS).map(lambda one: update(one[0], **one[1])),
    of_stream("DELETE", st.just(b"")),
    of_stream("MSG.GET", GETS),
    of_stream("MSG.DELETE", st.tuples(SEQUENCES, st.booleans()).map(lambda one: {"seq": one[0], "no_erase": one[1]})),
    of_stream("PURGE", PURGES),
    st.tuples(NAMES, PATTERNS).map(lambda one: info(one[0], subjects_filter=one[1], deleted_details=True)),
    PATTERNS.map(lambda pattern: Api("STREAM.NAMES", {"subject": pattern})),
)
ALL = [*(info(name, deleted_details=True) for name in "ABC"), Api("STREAM.LIST"), Api("INFO")]


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.timeout(600)
def test_random_sequences_get_equal_answers(both: Both, count: int) -> None:
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(first=CONFIGS, steps=st.lists(STEPS, min_size=5, max_size=40))
    def compared(first: dict[str, Any], steps: list[Step]) -> None:
        both.delete_all()
        both.compare([create("A", **first | {"subjects": ["a.>"]}), *steps, *ALL])

    compared()
