"""Whatever the order of appends, removals, edits, damage, repairs, crashes and changes of leaders: readers get what a
simple model in memory has, and the same of every replica.
"""

from __future__ import annotations

import os
import random
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from natslog.errors import CorruptLog
from natslog.log.rules import Rule
from natslog.model import Epoch
from tests.unit.log.removal_model import Message, Replica, Settings, Stream

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
SUBJECTS, KEYS = ("a", "b", "c"), (None, "k", "l")
NUMBERS, OFFSETS = st.integers(0, 2), st.integers(0, 40)
RULES = st.builds(Rule, st.just(Epoch(0)), st.sampled_from([None, 1, 2, 3]), st.booleans(), st.booleans())
MESSAGES = st.builds(
    Message,
    st.sampled_from(SUBJECTS),
    st.sampled_from(KEYS),
    st.sampled_from([None, None, 0, 2]),
    st.booleans(),
    st.sampled_from([None] * 8 + ["sub", "sub", "all"]),
)
TTLS = st.sampled_from([None, None, 4])
MOST_MESSAGES, MOST_BYTES = st.sampled_from([None, None, 5]), st.sampled_from([None, None, None, 5000])
SETTINGS = st.builds(
    Settings,
    st.tuples(RULES),
    st.just(3),
    st.booleans(),
    TTLS,
    MOST_MESSAGES,
    MOST_BYTES,
)
MAINTENANCE = st.sampled_from(["rewrite", "rewrite", "erase", "seal", "merge"])
APPEND = st.tuples(st.just("append"), st.lists(MESSAGES, min_size=1, max_size=6))
COPY = st.tuples(st.just("copy"), NUMBERS)
REMOVALS = st.one_of(
    st.tuples(st.just("delete"), OFFSETS),
    st.tuples(st.just("purge"), st.sampled_from(SUBJECTS), st.integers(0, 2)),
    st.tuples(st.just("purge_below"), OFFSETS),
    st.tuples(st.just("wait"), st.integers(1, 3)),
    st.tuples(st.just("expire")),
    st.tuples(st.just("erase"), st.just("subject"), st.sampled_from(SUBJECTS)),
    st.tuples(st.just("erase"), st.just("key"), st.sampled_from(KEYS[1:])),
)
EDITS = st.one_of(
    st.tuples(st.just("edit"), RULES),
    st.tuples(st.just("edit_limits"), MOST_MESSAGES, MOST_BYTES),
    st.tuples(st.just("edit_ttl"), st.booleans(), TTLS),
)
FILES = st.one_of(
    st.tuples(st.sampled_from(["roll", "seal", "merge", "rewrite", "erase_next", "retain"]), NUMBERS),
    st.tuples(st.just("compact"), NUMBERS),
    st.tuples(st.just("compact"), NUMBERS),
    st.tuples(st.just("seal_all")),
    st.tuples(st.just("record_hidden"), st.just(1)),
)
FAULTS = st.one_of(
    st.tuples(st.just("damage"), NUMBERS, st.integers(0, 1000)),
    st.tuples(st.just("damage_at_start"), NUMBERS, st.integers(0, 1000)),
    st.tuples(st.just("scrub")),
    st.tuples(st.just("crash"), NUMBERS, st.integers(0, 40).map(bytes)),
    st.tuples(st.just("crash_within"), NUMBERS, MAINTENANCE, st.integers(0, 5), st.booleans()),
    st.tuples(st.just("crash_within"), NUMBERS, MAINTENANCE, st.integers(0, 5), st.booleans()),
    st.tuples(st.just("reopen"), NUMBERS, st.booleans()),
    st.tuples(st.just("fail_over"), NUMBERS),
)
READERS = st.one_of(
    st.tuples(st.just("index"), st.sampled_from(SUBJECTS)),
    st.tuples(st.sampled_from(["begin_view", "begin_view", "read_views", "read_held", "look", "check"])),
    st.tuples(st.just("hold"), NUMBERS),
)
OPERATIONS = st.one_of(APPEND, APPEND, COPY, REMOVALS, REMOVALS, EDITS, FILES, FILES, FAULTS, READERS)
SEALED = st.lists(MESSAGES, min_size=4, max_size=8).map(lambda messages: [("append", messages), ("seal_all",)])
SEQUENCES = st.tuples(SEALED, SEALED, st.lists(OPERATIONS, min_size=12, max_size=40)).map(
    lambda parts: [*parts[0], *parts[1], *parts[2]]
)
"""They begin with sealed segments: otherwise most would have nothing to rewrite."""


def run(wanted: Settings, operations: list[tuple[Any, ...]], after_each: str | None = None) -> None:
    """`after_each`: the check that follows each operation."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        stream = Stream(Path(folder), wanted)
        for name, *arguments in operations:
            if name == "reopen":
                stream.reopen(arguments[0], stores=arguments[1])
            else:
                getattr(stream, name)(*arguments)
            if after_each is not None:
                getattr(stream, after_each)()
        stream.scrub()
        stream.check()
        stream.finish_erasures()
        stream.check()
        for number in range(3):
            stream.reopen(number, stores=False)
        stream.check()
        stream.close()


@pytest.mark.long
@pytest.mark.parametrize("is_repaired_first", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_rules_are_applied_to_rows_that_were_damaged_at_a_start(
    tmp_path: Path, seed: int, is_repaired_first: bool
) -> None:
    """Where another replica has them, readers wait for the repair; else they are passed over, and applied later."""
    stream = Stream(tmp_path, Settings((Rule(Epoch(0), 2, compacts=True),)))
    for _ in range(3):
        stream.append([Message("a", "k"), Message("b"), Message("c", "l")])
        stream.seal_all()
    replica = stream.followers[0]
    replica.flip(random.Random(seed), replica.sealed()[1])
    stream.reopen(stream.replicas.index(replica), stores=False)
    log, told = replica.log, list[CorruptLog]()
    log.visibility.on_damage = lambda error: told.append(error) or is_repaired_first  # type: ignore[func-returns-value]
    log.chain.committed = log.log_end_offset
    with suppress(CorruptLog):
        log.upkeep.apply_rules()
        assert not (told and is_repaired_first), "readers wait"
    log.visibility.store(0, at_least=1)
    assert is_repaired_first or bool(told) != (replica.folder / "newest").exists(), "what was passed over is not stored"
    assert all(3 <= error.facts["start"] < error.facts["end"] <= 6 for error in told)
    stream.scrub()
    stream.check()
    stream.close()


LIMIT_OF_TWO = Settings((Rule(Epoch(0), 2),))
TWO_SEGMENTS = [
    ("append", [Message("a")] * 2),
    ("seal_all",),
    ("append", [Message("a"), Message("b")]),
    ("seal_all",),
]
FOUND = [
    pytest.param([("delete", 2), ("copy", 0), ("copy", 1)], id="a removed row hides others, also after a repair"),
    pytest.param([("purge_below", 3), ("copy", 0), ("copy", 1)], id="a repair below the log start"),
    pytest.param([("purge_below", 3), ("copy", 0), ("copy", 1), ("retain", 0)], id="of what others have removed"),
]


@pytest.mark.long
@pytest.mark.parametrize("removal", FOUND)
def test_a_repair_restores_what_is_hidden(removal: list[tuple[Any, ...]]) -> None:
    for seed in range(12):
        damage = [("damage", 1, seed), ("scrub",), ("reopen", 1, False)]
        run(LIMIT_OF_TWO, [*TWO_SEGMENTS, *removal, *damage])


def test_a_limit_is_the_same_on_a_leader_that_was_asked_for_newest_messages() -> None:
    for operation in ("look",), ("index", "a"):
        before = [("append", [Message("a")]), ("copy", 0), ("copy", 1), operation]
        edit = ("edit", Rule(Epoch(0), 2, compacts=False))
        run(Settings((Rule(Epoch(0), None, compacts=True),)), [*before, edit, ("append", [Message("a")] * 2)])


CHECKS = {"settled": "check", "as they are": "look_at_all", "rarely": None}
"""After each operation. A check makes replicas read and receive what they would receive later otherwise."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("examples", [8, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("checked", CHECKS)
def test_replicas_show_what_a_model_has(checked: str, examples: int) -> None:
    @settings(derandomize=True, deadline=None, max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(SETTINGS, SEQUENCES)
    def check(wanted: Settings, operations: list[tuple[Any, ...]]) -> None:
        note(f"run({wanted!r}, {operations!r}, {CHECKS[checked]!r})")
        run(wanted, operations, CHECKS[checked])

    check()


COMPACTED = Settings((Rule(Epoch(0), None, compacts=True),))
SHORT = [
    pytest.param(
        Settings((Rule(Epoch(0), rolls_up=True),)),
        [("append", [Message("a"), Message("b"), Message("a"), Message("a", rollup="sub"), Message("a")])],
        id="a roll-up hides what is in its batch",
    ),
    pytest.param(
        Settings((Rule(Epoch(0), rolls_up=True),)),
        [("append", [Message("a"), Message("b")]), ("append", [Message("a", rollup="all"), Message("a")])],
        id="a roll-up of all",
    ),
    pytest.param(Settings(max_bytes=5000), [("append", [Message("a")] * 3)] * 9, id="a limit of bytes"),
    pytest.param(
        COMPACTED,
        [("append", [Message("a", ttl_s=2), Message("a")]), ("check",), ("edit_ttl", True, None), ("wait", 3)],
        id="an edit lets stored messages expire",
    ),
    pytest.param(
        COMPACTED,
        [
            *[("append", [Message("a", "k")]), ("seal_all",)] * 2,
            ("delete", 1),
            *[("copy", number) for number in (0, 1, 0)],
            ("rewrite", 1),
            ("reopen", 1, False),
        ],
        id="a message is not dropped while what it hides is in no record",
    ),
    *[
        pytest.param(
            COMPACTED,
            [
                ("append", [Message("a"), Message("a")]),
                ("edit", Rule(Epoch(0), limit)),
                ("append", [Message("a")] * limit),
                ("compact", 1),
                ("reopen", 1, False),
            ],
            id=f"a limit of {limit} replaces a rule without one",
        )
        for limit in (1, 2)
    ],
]


@pytest.mark.parametrize(("wanted", "operations"), SHORT)
@pytest.mark.parametrize("checked", CHECKS)
def test_short_sequences(wanted: Settings, operations: list[tuple[Any, ...]], checked: str) -> None:
    run(wanted, operations, CHECKS[checked])


KEYED = [Message("a", "k"), Message("b", "l"), Message("c")] * 2


def test_a_view_and_a_plan_in_use_are_as_they_were_until_an_erasure(tmp_path: Path) -> None:
    """Their messages are superseded and removed, and the files are rewritten without all others."""
    stream = Stream(tmp_path, Settings((Rule(Epoch(0), None, compacts=True),)))
    stream.append(KEYED)
    stream.seal_all()
    stream.begin_view()
    stream.hold(0)
    ((_, view),) = stream.views.items()
    assert list(view.view.visible) == [3, 4]
    stream.append(KEYED)
    stream.purge("c", 0)
    stream.compact(0)
    assert stored_rows(stream.leader) == {3, 4, *range(6, 12)}, "the file was rewritten"
    stream.read_views()
    assert len(stream.views) == 1
    assert [one.expected for one in stream.plans] == [[2, 3, 4, 5]]
    stream.erase("subject", "b")
    stream.check()
    assert not stream.views, "it had an erased message"
    stream.finish_erasures()
    stream.compact(0)
    assert stored_rows(stream.leader).isdisjoint({3, 4})
    stream.read_held()
    stream.close()


def stored_rows(replica: Replica) -> set[int]:
    batches = (batch for _, batch in replica.log.reader.stored_rows(0, replica.log.log_end_offset))
    return {offset for batch in batches for offset in batch.column("offset").to_pylist()}


@pytest.mark.parametrize("rewritten", [0, 1])
@pytest.mark.parametrize("rule", [Rule(Epoch(0), 2), Rule(Epoch(0), None, compacts=True)], ids=["limit", "compaction"])
def test_messages_removed_before_a_rule_was_added_count_for_it_on_no_replica(rewritten: int, rule: Rule) -> None:
    """One replica has rewritten its files without them; the others have them still."""
    run(
        Settings(),
        [
            ("append", [Message("a", "k")] * 3),
            ("seal_all",),
            ("append", [Message("b")]),
            ("delete", 2),
            *[("copy", number) for number in (0, 1, 0)],
            ("rewrite", rewritten),
            ("edit", rule),
            ("check",),
        ],
    )
