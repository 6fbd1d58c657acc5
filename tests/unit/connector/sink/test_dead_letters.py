"""Which rows become dead letters, and what these say."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.schema import HEADERS_TYPE
from natslog.errors import ConfigError
from natslog.wire.outgoing_rows import Rows, check_rows
from pyspark_natslog.sink.dead_letters import split_dead
from pyspark_natslog.sink.options import SinkOptions

LIMIT = 2000


def split(subjects, values, keys=None, headers=None, **origin):
    count = len(values)
    rows = Rows(
        subjects=pa.array(subjects, pa.string()),
        values=pa.array(values, pa.binary()),
        keys=None if keys is None else pa.array(keys, pa.binary()),
        headers=None if headers is None else pa.array(headers, HEADERS_TYPE),
        ids=pa.array([f"good{at}" for at in range(count)]),
    )
    batch = pa.RecordBatch.from_pydict({"value": rows.values} | {name: pa.array(got) for name, got in origin.items()})
    own_ids = pa.array([f"own{at}" for at in range(count)])
    return split_dead(rows, batch, subject="dead", max_payload_bytes=LIMIT, own_ids=own_ids)


def letters_of(dead: Rows) -> list[dict[str, str]]:
    return [{pair["key"]: pair["value"] for pair in pairs} for pairs in dead.headers.to_pylist()]


def test_rows_that_can_be_sent_stay_and_none_is_a_letter() -> None:
    good, dead = split(["a", "b.c"], [b"1", b"2"], keys=[b"k", None])
    assert dead is None
    assert good.values.to_pylist() == [b"1", b"2"]


def test_letters_say_why_where_to_and_where_from() -> None:
    subjects = ["a", "a..b", None, "fine", "fine"]
    values = [b"1", b"2", b"3", None, b"x" * 5000]
    good, dead = split(subjects, values, stream=["s"] * 5, offset=[10, 11, 12, 13, 14])
    assert good.values.to_pylist() == [b"1"]
    assert good.ids.to_pylist() == ["good0"]
    assert dead is not None
    assert dead.ids.to_pylist() == [f"own{at}" for at in range(1, 5)]
    assert set(dead.subjects.to_pylist()) == {"dead"}
    letters = letters_of(dead)
    assert [letter["Natslog-Offset"] for letter in letters] == ["11", "12", "13", "14"]
    assert {letter["Natslog-Stream"] for letter in letters} == {"s"}
    assert letters[0]["Natslog-Error"] == "subject is not one plain NATS subject"
    assert letters[0]["Natslog-Subject"] == "a..b"
    assert "Natslog-Subject" not in letters[1]
    assert letters[2]["Natslog-Error"] == "value is null"
    assert letters[3]["Natslog-Error"].startswith("message is larger than the server's limit of 2000 bytes")
    assert letters[3]["Natslog-Truncated"] == "5000"
    assert dead.values.to_pylist()[:3] == [b"2", b"3", b""]


def test_own_key_and_headers_stay_where_they_are_allowed() -> None:
    headers = [
        [{"key": "Trace", "value": "t"}, {"key": "bad name", "value": "x"}],
        [{"key": "A", "value": "line\nline"}],
    ]
    good, dead = split(["a", "a"], [b"1", b"2"], keys=[b"k", b"two\nlines"], headers=headers)
    assert len(good) == 0
    assert dead is not None
    first, second = letters_of(dead)
    assert (first["Trace"], first["Natslog-Key"]) == ("t", "k")
    assert "bad name" not in first
    assert set(second) == {"Natslog-Error", "Natslog-Subject"}


TEXT = st.text(max_size=60)


@pytest.mark.long
@settings(deadline=None, max_examples=80)
@given(
    rows=st.lists(
        st.tuples(
            st.none() | TEXT,
            st.none() | st.binary(max_size=3 * LIMIT),
            st.none() | st.binary(max_size=40),
            st.none() | st.lists(st.fixed_dictionaries({"key": TEXT, "value": TEXT}), max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_whatever_the_rows_every_letter_and_every_other_row_can_be_sent(rows) -> None:
    """Invariant: what comes out is sendable, and each row comes out once."""
    subjects, values, keys, headers = (list(column) for column in zip(*rows, strict=True))
    good, dead = split(subjects, values, keys, headers)
    check_rows(good, LIMIT)
    if dead is not None:
        check_rows(dead, LIMIT)
    assert len(good) + (0 if dead is None else len(dead)) == len(rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"onError": "deadletter"}, "onError .deadletter. requires .*deadLetterSubject"),
        ({"deadLetterSubject": "x"}, "deadLetterSubject requires .*onError.*deadletter"),
        ({"onError": "drop"}, "option onError 'drop' must be fail or deadletter"),
        ({"onError": "deadletter", "deadLetterSubject": "x.*"}, "option deadLetterSubject.*wildcard"),
        ({"natsTlsKeyFile": "k.pem"}, "natsTlsKeyFile requires natsTlsCertFile"),
        ({"natsTlsCa": "k.pem"}, "did you mean 'natsTlsCaFile'"),
        ({"maxInFlight": "none"}, "maxInFlight"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SinkOptions.parse(options)
