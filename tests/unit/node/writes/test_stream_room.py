"""Streams that refuse new messages at their limits, compared with a stream that takes one message at a time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from natslog.errors import LimitReached
from natslog.log import ReplicaLog
from natslog.log.removed import offset_range
from natslog.log.rules import Rule
from natslog.model import Epoch
from natslog.node.writes.stream_room import StreamRoom
from natslog.wire.frames import FrameParser
from tests.conftest import open_log, retain, rows
from tests.unit.node.writes.answers import Answers, frame
from tests.unit.node.writes.test_stream_ingest import run

Message = tuple[str, str | None]
FULL = "maximum messages exceeded"


class Model:
    """A stream that takes one message at a time."""

    def __init__(self, most: int, per_subject: int | None, compacts: bool) -> None:
        self.most, self.per_subject, self.compacts = most, per_subject, compacts
        self.stored: list[Message] = []
        self.visible: set[int] = set()

    def answer(self, subject: str, key: str | None) -> Any:
        hidden: set[int] = set()
        if self.per_subject is not None:
            hidden |= set(
                [at for at, one in enumerate(self.stored) if one[0] == subject][: 1 - self.per_subject or None]
            )
        if self.compacts and key is not None:
            hidden |= {at for at, one in enumerate(self.stored) if one[1] == key}
        hidden &= self.visible
        if not hidden and len(self.visible) >= self.most:
            return FULL
        self.visible = self.visible - hidden | {len(self.stored)}
        self.stored.append((subject, key))
        return len(self.stored)


@pytest.mark.parametrize("seed", range(12))
def test_commits_answer_as_a_stream_that_takes_one_message_at_a_time(log_folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    per_subject, compacts = chance.choice([None, 1, 2, 3]), chance.random() < 0.5
    model = Model(chance.randrange(2, 5), per_subject, compacts)
    log = open_log(log_folder, max_messages=model.most, discard="new")
    log.visibility.set_rules((Rule(Epoch(0), per_subject, compacts),), 0)
    answers, expected = Answers(), dict[int, Any]()

    async def work(ingest: Any, _: Any) -> None:
        ingest._refusals._sender = answers
        for _ in range(12):
            parser = FrameParser()
            for _ in range(chance.randrange(1, 9)):
                subject = f"orders.{chance.randrange(6)}"
                key = chance.choice([None, None, "a", "b"])
                parser.receive_data(frame(subject, {"Natslog-Key": key} if key else {}, len(expected)))
                expected[len(expected)] = model.answer(subject, key)
            for frames in parser.frames():
                ingest.receive(frames)
            await answers.wait_for(len(expected))
            if model.visible and chance.random() < 0.5:
                removed = chance.choice(sorted(model.visible))
                model.visible.discard(removed)
                log.visibility.removed.record(offset_range(removed, removed + 1))

    run(log, work)
    assert answers.by_number == expected
    assert FULL in expected.values(), "the limit was reached"
    log.close()


def decided(log: ReplicaLog, values: list[bytes], subject: str = "orders.new") -> list[str | None]:
    """Of each message of a commit why it is refused."""
    room = StreamRoom(log).of_commit(rows(values, subject))
    if room is None:
        return [None] * len(values)
    errors = [room.why_not(at, at) for at in range(len(values))]
    return [None if error is None else error.message for error in errors]


def test_uncommitted_messages_count(log_folder: Path) -> None:
    log = open_log(log_folder, max_messages=4, discard="new")
    log.chain.committed = 0
    log.append(rows([b"x"] * 3), 1)
    assert decided(log, [b"x"] * 2) == [None, FULL]
    log.close()


def test_uncommitted_messages_hide_others_as_committed_ones_do(log_folder: Path) -> None:
    log = open_log(log_folder, max_messages=3, discard="new")
    log.visibility.set_rules((Rule(Epoch(0), 1),), 0)
    log.append(rows([b"x"], "orders.a"), 1)
    log.chain.committed = 1
    log.append(rows([b"x"], "orders.a"), 1)
    log.append(rows([b"x"], "orders.b"), 1)
    assert decided(log, [b"x", b"x"], "orders.c") == [None, None], "the second c takes the place of the first"
    log.append(rows([b"x"], "orders.c"), 1)
    assert (decided(log, [b"x"], "orders.d"), decided(log, [b"x"], "orders.a")) == ([FULL], [None])
    log.close()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_stored_bytes_never_exceed_the_limit(log_folder: Path, seed: int) -> None:
    chance, most = random.Random(seed), 100_000
    log = open_log(log_folder, max_bytes=most, discard="new")
    room, refused = StreamRoom(log), 0
    for _ in range(200):
        values = [bytes(chance.randrange(5_000)) for _ in range(chance.randrange(1, 6))]
        accepted = [value for value, why_not in zip(values, decided(log, values), strict=True) if why_not is None]
        refused += len(values) - len(accepted)
        if accepted:
            log.append(rows(accepted), 1)
            assert log.visible_size.bytes() <= most
        if len(accepted) < len(values):
            largest = max(map(len, values))
            assert log.visible_size.bytes() + largest + 4_000 > most, "there was no room for it"
            offset = chance.randrange(log.log_end_offset)
            was, is_new = log.visible_size.bytes(), not log.visibility.removed.is_hidden(offset)
            log.visibility.removed.record(offset_range(offset, offset + 1))
            assert (log.visible_size.bytes() < was) == is_new, "a removed message makes room at once"
        if chance.random() < 0.1:
            log.roll()
            log.upkeep.seal_next()
    assert refused
    assert not room.fits(1, most)
    log.close()


def test_rows_that_belong_together_are_accepted_or_refused_together(log_folder: Path) -> None:
    log = open_log(log_folder, max_messages=4, discard="new")
    room = StreamRoom(log).of_commit(rows([b"x"] * 8))
    assert room is not None
    given = [(0, 0), (1, 4), (5, 7)]
    assert [room.why_not(*one) is None for one in given] == [True, False, True]
    log.close()


def test_direct_append_that_would_exceed_a_limit_is_refused_as_a_whole(log_folder: Path) -> None:
    log = open_log(log_folder, max_messages=4, max_bytes=50_000, discard="new")
    log.append(rows([b"x"] * 2), 1)
    room = StreamRoom(log)
    room.require(2, 10_000)
    with pytest.raises(LimitReached, match=r"exceeded: the stream has 2 of 4 messages \(max_messages\)"):
        room.require(3, 10_000)
    with pytest.raises(
        LimitReached, match=r"maximum bytes exceeded.* of 50000 bytes \(max_bytes\).*none of the 2 rows"
    ):
        room.require(2, 50_000)
    log.close()


def test_commit_that_certainly_fits_is_not_visited_row_by_row(log_folder: Path) -> None:
    log = open_log(log_folder, max_messages=4, max_bytes=50_000, discard="new")
    assert StreamRoom(log).of_commit(rows([b"x"] * 4)) is None
    assert StreamRoom(log).of_commit(rows([b"x"] * 5)) is not None
    log.close()


def test_lower_limit_removes_nothing(log_folder: Path) -> None:
    log = open_log(log_folder, max_messages=2, max_bytes=1, discard="new")
    log.append(rows([b"x"] * 5), 1)
    retain(log, 2)
    assert log.first_readable_offset == 0
    assert decided(log, [b"x"]) == [FULL]
    log.close()
