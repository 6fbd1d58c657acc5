"""Conditions of rows within one commit, compared with a log that takes one message at a time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from natslog.ingest.batches import BatchBuilder
from natslog.ingest.conditions import conditions_of
from natslog.ingest.dedupe import NEW
from natslog.log.rules import Rule
from natslog.model import Epoch
from natslog.node.writes.admission import REFUSED, refusals_of
from natslog.node.writes.last_of_subjects import LastOfSubjects
from natslog.wire.frames import FrameParser
from tests.conftest import open_log
from tests.unit.log.test_visibility import rows_of
from tests.unit.node.writes.answers import Answers, frame
from tests.unit.node.writes.test_stream_ingest import run

Message = tuple[str, dict[str, str]]
LAST, LAST_OF_SUBJECT = "Nats-Expected-Last-Sequence", "Nats-Expected-Last-Subject-Sequence"
LAST_ID, ID = "Nats-Expected-Last-Msg-Id", "Nats-Msg-Id"


class Model:
    """A stream that takes one message at a time."""

    def __init__(self) -> None:
        self.stored: list[Message] = []
        self.removed: set[int] = set()
        self.ids: dict[str, int] = {}

    def answer(self, subject: str, headers: dict[str, str]) -> Any:
        if (known := self.ids.get(headers.get(ID, ""))) is not None:
            return known + 1
        others = [at for at, one in enumerate(self.stored) if one[0] == subject and at not in self.removed]
        of_subject = max(others, default=-1) + 1
        if headers.get(LAST_OF_SUBJECT, str(of_subject)) != str(of_subject):
            return f"wrong last sequence: {of_subject}"
        last = len(self.stored)
        if headers.get(LAST, str(last)) != str(last):
            return f"wrong last sequence: {last}"
        last_id = self.stored[-1][1].get(ID, "") if self.stored else ""
        if headers.get(LAST_ID, last_id) != last_id:
            return f"wrong last msg ID: {last_id}"
        if ID in headers:
            self.ids[headers[ID]] = len(self.stored)
        rollup = headers.get("Nats-Rollup")
        self.removed |= set(others if rollup == "sub" else range(last) if rollup == "all" else ())
        self.stored.append((subject, headers))
        return len(self.stored)


def some_messages(chance: random.Random, count: int, about: int) -> list[Message]:
    messages: list[Message] = []
    for _ in range(count):
        headers: dict[str, str] = {}
        guess = str(max(0, about + chance.randrange(-1, count)))
        if chance.random() < 0.4:
            headers[ID] = f"id-{chance.randrange(2 * count)}"
        if chance.random() < 0.5:
            headers[chance.choice([LAST, LAST_OF_SUBJECT])] = chance.choice([guess, "0", str(about)])
        if chance.random() < 0.2:
            headers["Nats-Rollup"] = chance.choice(["sub", "all"])
        if chance.random() < 0.1:
            headers[LAST_ID] = f"id-{chance.randrange(count)}"
        messages.append((f"orders.{chance.randrange(4)}", headers))
    return messages


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_commits_answer_as_a_stream_that_takes_one_message_at_a_time(log_folder: Path, seed: int) -> None:
    chance, model = random.Random(seed), Model()
    log = open_log(log_folder, allow_rollup=True)
    log.visibility.set_rules((Rule(Epoch(0), rolls_up=True),), 0)
    answers, expected = Answers(), dict[int, Any]()

    async def work(ingest: Any, _: Any) -> None:
        ingest._refusals._sender = answers
        for _ in range(6):
            parser = FrameParser()
            for subject, headers in some_messages(chance, 12, len(model.stored)):
                parser.receive_data(frame(subject, headers, len(expected)))
                expected[len(expected)] = model.answer(subject, headers)
            for frames in parser.frames():
                ingest.receive(frames)
            await answers.wait_for(len(expected))

    run(log, work)
    assert answers.by_number == expected
    assert {
        offset for batch in log.reader.visible_rows(0, log.high_watermark) for offset in batch["offset"].to_pylist()
    } == (set(range(len(model.stored))) - model.removed)
    log.close()


def test_roll_up_that_is_appended_after_the_edit_that_forbids_it_is_refused(log_folder: Path) -> None:
    log = open_log(log_folder)
    log.visibility.set_rules((Rule(Epoch(0), rolls_up=True), Rule(Epoch(2))), 0)
    parser, builder = FrameParser(), BatchBuilder()
    parser.receive_data(frame("orders.a", {"Nats-Rollup": "all"}, 0))
    for frames in parser.frames():
        builder.add_conditions(conditions_of(frames))
        builder.add(frames)
    for epoch, expected in ((1, []), (2, ["rollup not permitted"])):
        if epoch > 1:
            log.begin_epoch(Epoch(epoch))
        refused = refusals_of(builder.taken(), np.full(1, NEW, np.int64), log, LastOfSubjects(log))
        assert [error.message for _, error in refused] == expected
    log.close()


def test_many_rows_of_one_subject_are_decided_in_one_pass(log_folder: Path) -> None:
    log = open_log(log_folder)
    parser, builder = FrameParser(), BatchBuilder()
    parser.receive_data(b"".join(frame("orders.a", {LAST_OF_SUBJECT: "0"}, at) for at in range(2000)))
    for frames in parser.frames():
        builder.add_conditions(conditions_of(frames))
        builder.add(frames)
    batch = builder.taken()
    offsets = np.full(2000, NEW, np.int64)
    refused = refusals_of(batch, offsets, log, LastOfSubjects(log))
    assert [row for row, _ in refused] == list(range(1, 2000))
    assert (offsets[0], set(offsets[1:].tolist())) == (NEW, {REFUSED})
    log.close()


def test_uncommitted_roll_up_of_all_removes_the_last_message_of_other_subjects(log_folder: Path) -> None:
    log = open_log(log_folder)
    log.visibility.set_rules((Rule(Epoch(0), rolls_up=True),), 0)
    last = LastOfSubjects(log)
    log.append(rows_of([("a", None, None), ("b", None, None)], 0), 1)
    log.chain.committed = 1
    assert [last.last_sequence(subject) for subject in "ab"] == [1, 2]
    later = rows_of([("b", None, "all"), ("b", None, None)], 2)
    last.appended(later, log.append(later, 1)[0])
    for one in (last, LastOfSubjects(log)):
        assert [one.last_sequence(subject) for subject in "ab"] == [0, 4]
    log.close()
