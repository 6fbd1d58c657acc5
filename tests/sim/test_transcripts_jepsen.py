"""What the report "Jepsen: NATS 2.12.1" found, told by hand with the real cores, as far as it concerns them.

Its lines: damaged `.blk` files on a minority (7549), damaged snapshots and streams deleted as orphans (7556), power
lost everywhere under lazy fsync (7564) or on one node (7567), streams gone after crashes (6888, in 2.10.22), and
changes of members beside it (7545, in `test_transcripts`). The numbers are issues of nats-io/nats-server.
"""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

import pytest

from natslog.cluster.metadata import Metadata
from tests.sim import cluster_mutants as mutants
from tests.sim.cluster_process import NAME
from tests.sim.raft_checker import Violation
from tests.sim.transcript import Story


def story_jepsen_damaged_blocks_on_a_minority() -> Story:
    """Bit flips and truncations of `.blk` files on two of five lost records on all: the damaged ones led (issue 7549).
    Here they neither lead nor count until they have fetched. (That damage is found: tests/unit/log/test_recovery.py.)
    """
    story = Story(replicas=5, min_isr=3)
    story.publish("A", 1, 2, 3)
    story.in_step("A", "BCDE")
    story.find_damage("E", 1)
    story.find_damage("A", 0)
    story.decide("AE")
    story.decide("ABCDE")
    story.everyone_learns()
    story.tell_logs("AE")
    story.publish("B", 4)
    story.in_step("B", "ACDE")
    story.change_isr("B", "ACDE")
    return story


def story_jepsen_power_lost_everywhere() -> Story:
    """A coordinated power failure lost what was acked and not fsynced (issue 7564). Here an ack means fsynced on all in
    sync; even where one disk lied about it, a majority of the logs is asked before anybody leads. It is the story too
    of processes killed all at once, after which JetStream 2.10.22 had no stream any more (issue 6888): metadata is on
    disk before it is answered for (tests/unit/node/test_raft_store.py), and so the record is still there.
    """
    story = Story()
    story.publish("A", 1, 2)
    story.in_step("A", "BC")
    story.publish("A", 3)
    story.restart("A", lost=2)
    story.restart("B")
    story.restart("C")
    story.decide("A")
    story.decide("AC")
    story.everyone_learns()
    story.in_step("C", "AB")
    story.change_isr("C", "AB")
    return story


def story_jepsen_power_lost_on_one_and_pauses() -> Story:
    """One node loses its tail; before, B stood still, and after, A and E do: JetStream went on with two histories
    (issue 7567). Here B and C wait, as neither can know what was acked; when D is there, all three have it.
    """
    story = Story(replicas=5, min_isr=3)
    story.publish("A", 1)
    story.in_step("A", "BCDE")
    story.change_isr("A", "CDE")
    story.publish("A", 2, 3)
    story.in_step("A", "CDE")
    story.restart("C", lost=2)
    story.decide("BC")
    story.decide("BCD")
    story.everyone_learns("BCD")
    story.in_step("D", "BC")
    story.change_isr("D", "BC")
    return story


TOLD: dict[Callable[[], Story], str] = {
    story_jepsen_damaged_blocks_on_a_minority: """
        appointed: A leads epoch 2, ISR ABCDE
        A takes 1 2 3: A [2:1 2:2 2:3] HW 0
        in step
          A [2:1 2:2 2:3] HW 3
          B [2:1 2:2 2:3] HW 3
          C [2:1 2:2 2:3] HW 3
          D [2:1 2:2 2:3] HW 3
          E [2:1 2:2 2:3] HW 3
        E finds damage from 1 on: A leads epoch 2, ISR ABCD
        A finds damage from 0 on: nobody leads epoch 2, ISR BCD
        AE are there: nobody leads epoch 2, ISR BCD
        ABCDE are there: B leads epoch 3, ISR BCD
          A [] HW 0
          E [2:1] HW 0
        B takes 4: B [2:1 2:2 2:3 3:4] HW 3
        in step
          B [2:1 2:2 2:3 3:4] HW 4
          A [2:1 2:2 2:3 3:4] HW 4
          C [2:1 2:2 2:3 3:4] HW 4
          D [2:1 2:2 2:3 3:4] HW 4
          E [2:1 2:2 2:3 3:4] HW 4
        B hears of ACDE: B leads epoch 3, ISR ABCDE
        """,
    story_jepsen_power_lost_everywhere: """
        appointed: A leads epoch 2, ISR ABC
        A takes 1 2: A [2:1 2:2] HW 0
        in step
          A [2:1 2:2] HW 2
          B [2:1 2:2] HW 2
          C [2:1 2:2] HW 2
        A takes 3: A [2:1 2:2 2:3] HW 2
        A restarts after a crash, its disk has lost 2: nobody leads epoch 2, ISR ABC, unproven A
          A [2:1] HW 0
        B restarts after a crash: nobody leads epoch 2, ISR ABC, unproven AB
          B [2:1 2:2] HW 0
        C restarts after a crash: nobody leads epoch 2, ISR ABC, unproven ABC
          C [2:1 2:2] HW 0
        A are there: nobody leads epoch 2, ISR ABC, unproven ABC
        AC are there: C leads epoch 3, ISR AC, unproven A
        in step
          C [2:1 2:2] HW 2
          A [2:1 2:2] HW 2
          B [2:1 2:2] HW 2
        C hears of AB: C leads epoch 3, ISR ABC
        """,
    story_jepsen_power_lost_on_one_and_pauses: """
        appointed: A leads epoch 2, ISR ABCDE
        A takes 1: A [2:1] HW 0
        in step
          A [2:1] HW 1
          B [2:1] HW 1
          C [2:1] HW 1
          D [2:1] HW 1
          E [2:1] HW 1
        A hears of CDE: A leads epoch 2, ISR ACDE
        A takes 2 3: A [2:1 2:2 2:3] HW 1
        in step
          A [2:1 2:2 2:3] HW 3
          C [2:1 2:2 2:3] HW 3
          D [2:1 2:2 2:3] HW 3
          E [2:1 2:2 2:3] HW 3
        C restarts after a crash, its disk has lost 2: A leads epoch 2, ISR ACDE, unproven C
          C [2:1] HW 0
        BC are there: A leads epoch 2, ISR ACDE, unproven C
        BCD are there: D leads epoch 3, ISR CD, eligible AE, unproven C
        in step
          D [2:1 2:2 2:3] HW 3
          B [2:1 2:2 2:3] HW 3
          C [2:1 2:2 2:3] HW 3
        D hears of BC: D leads epoch 3, ISR BCD
        """,
}


@pytest.mark.parametrize("story", TOLD, ids=lambda story: story.__name__.removeprefix("story_"))
def test_story_is_as_told(story: Callable[[], Story]) -> None:
    assert story().text == dedent(TOLD[story]).strip()


WITHOUT_RULE: dict[str, tuple[Callable[[], Story], mutants.Patch]] = {
    "one position is enough": (
        story_jepsen_power_lost_everywhere,
        mutants.replaced(mutants.controller, "quorum_position", mutants.best_of_any),
    ),
    "every restart is clean": (
        story_jepsen_power_lost_on_one_and_pauses,
        mutants.replaced(Metadata, "_register", mutants.register_as_clean),
    ),
}


@pytest.mark.parametrize("name", WITHOUT_RULE)
def test_story_without_its_rule_ends_badly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    story, patch = WITHOUT_RULE[name]
    patch(monkeypatch)
    with pytest.raises(Violation):
        story()


def test_stream_that_the_metadata_does_not_know_keeps_its_files() -> None:
    """Damaged snapshots of its metadata made JetStream take streams for orphans and delete them (issue 7556). Here
    absence deletes nothing, only a tombstone does. (Damaged metadata stops the broker: unit/node/test_raft_store.py; a
    damaged snapshot is not installed: "installs damage" in test_raft_mutations.)
    """
    story = Story()
    story.publish("A", 1, 2)
    story.in_step("A", "BC")
    walker = story.of("B")
    del walker.state.streams[NAME]
    walker.look_at_records()
    story.finish(walker)
    walker.tick()
    assert story.log_of("B") == "B [2:1 2:2] HW 2"
