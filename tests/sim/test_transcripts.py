"""Named scenarios told by hand, line by line, with the real cores: KIP-101, KIP-279, KIP-320, KIP-966, and a move.

A change of behaviour is a diff of a story. Where one rule makes the difference, the story is told without it too, and
the checker must object. `test_transcripts_jepsen` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

import pytest

from natslog.cluster import leading, metadata
from natslog.cluster.metadata import Metadata
from natslog.cluster.roles import FollowerReplica
from tests.sim import cluster_mutants as mutants
from tests.sim.raft_checker import Violation
from tests.sim.transcript import Story


def story_kip_101_restart_before_the_next_fetch() -> Story:
    """Scenario 1: B has the records and not yet HW, restarts, and must lead at once: cutting to HW would lose both."""
    story = Story(replicas=2)
    story.publish("A", 1, 2)
    story.fetch("B", "A")
    story.hears("A", story.asks("B"))
    story.restart("B", is_clean=True)
    story.everyone_learns("B")
    story.appoint("B", "AB")
    story.everyone_learns()
    story.in_step("B", "A")
    return story


def story_kip_101_divergence() -> Story:
    """Scenario 2: the old leader comes back with a record at an offset that the new one has given to another."""
    story = Story()
    story.publish("A", 1)
    story.in_step("A", "BC")
    story.publish("A", 2)
    story.appoint("B", "ABC")
    story.everyone_learns("BC")
    story.publish("B", 3)
    story.everyone_learns("A")
    story.fetch("A", "B")
    story.fetch("A", "B")
    story.in_step("B", "AC")
    return story


def story_kip_279_two_fast_failovers() -> Story:
    """B led one epoch without followers; A never received it. B steps back to where both agree."""
    story = Story()
    story.publish("A", 1)
    story.in_step("A", "BC")
    story.publish("A", 2)
    story.appoint("B", "ABC")
    story.everyone_learns("B")
    story.publish("B", 3, 4)
    story.appoint("A", "ABC")
    story.everyone_learns("AC")
    story.publish("A", 5)
    story.everyone_learns("B")
    story.fetch("B", "A")
    story.fetch("B", "A")
    story.in_step("A", "BC")
    return story


def story_kip_320_question_of_an_older_epoch() -> Story:
    """B's question lies about while C makes B cut; when A leads again it must not take it for an ack."""
    story = Story()
    story.publish("A", 1)
    story.in_step("A", "BC")
    story.publish("A", 2, 3)
    story.fetch("B", "A")
    late = story.asks("B")
    story.appoint("C", "C")
    story.everyone_learns("BC")
    story.fetch("B", "C")
    story.appoint("A", "AB")
    story.everyone_learns("A")
    story.hears("A", late)
    story.publish("A", 2, 3)
    story.everyone_learns("B")
    story.in_step("A", "B")
    return story


def story_kip_320_answer_of_an_older_epoch() -> Story:
    """A's word where to cut lies about while C leads and commits; B must not follow it any more."""
    story = Story()
    story.publish("A", 1)
    story.in_step("A", "BC")
    story.appoint("B", "ABC")
    story.everyone_learns("B")
    story.publish("B", 9)
    story.appoint("A", "ABC")
    story.everyone_learns("ABC")
    late = story.hears("A", story.asks("B"))
    story.appoint("C", "ABC")
    story.everyone_learns()
    story.publish("C", 2)
    story.in_step("C", "AB")
    story.takes("B", late)
    return story


def story_kip_966_last_replica_standing() -> Story:
    """A remains alone, below min_isr, and its disk then loses what was committed: B, who left last, still has it. Alone
    or with C, who left before, A never leads; with B it does not need to.
    """
    story = Story()
    story.publish("A", 1)
    story.in_step("A", "BC")
    story.change_isr("A", "B")
    story.publish("A", 2)
    story.in_step("A", "B")
    story.change_isr("A", "")
    story.publish("A", 3)
    story.restart("A", lost=1)
    story.decide("C")
    story.decide("AC")
    story.decide("ABC")
    story.everyone_learns()
    story.in_step("B", "AC")
    story.change_isr("B", "AC")
    return story


def story_moved_away_and_back() -> Story:
    """C's files go, and it is moved back while what it asked before still lies about. (A change of members of the kind
    that loses acked records of JetStream, nats-server issue 7545; changes of Raft's own members are test_raft's.)
    """
    story = Story(brokers=4)
    story.publish("A", 1)
    story.in_step("A", "BC")
    story.everyone_learns()
    story.move("ABD")
    story.everyone_learns()
    story.fetch("D", "A")
    story.fetch("D", "A")
    story.change_isr("A", "BCD")
    late = story.asks("C")
    story.decide("ABD")
    story.everyone_learns("ABCD")
    story.tell_logs("C")
    story.in_step("A", "BD")
    story.move("ABC")
    story.everyone_learns("A")
    story.hears("A", late)
    story.change_isr("A", "BCD")
    story.everyone_learns()
    story.in_step("A", "BCD")
    story.change_isr("A", "BCD")
    return story


TOLD: dict[Callable[[], Story], str] = {
    story_kip_101_restart_before_the_next_fetch: """
        appointed: A leads epoch 2, ISR AB
        A takes 1 2: A [2:1 2:2] HW 0
        B asks in epoch 2 from 0, after epoch 0
        A says 2:1 2:2; A [2:1 2:2] HW 0
        B has [2:1 2:2] HW 0
        B asks in epoch 2 from 2, after epoch 2
        A says that there is no more; A [2:1 2:2] HW 2
        B restarts in order: A leads epoch 2, ISR AB
          B [2:1 2:2] HW 0
        appointed: B leads epoch 3, ISR AB
        in step
          B [2:1 2:2] HW 2
          A [2:1 2:2] HW 2
        """,
    story_kip_101_divergence: """
        appointed: A leads epoch 2, ISR ABC
        A takes 1: A [2:1] HW 0
        in step
          A [2:1] HW 1
          B [2:1] HW 1
          C [2:1] HW 1
        A takes 2: A [2:1 2:2] HW 1
        appointed: B leads epoch 3, ISR ABC
        B takes 3: B [2:1 3:3] HW 1
        A asks in epoch 3 from 2, after epoch 2
        B says that its epoch 2 ends at 1; B [2:1 3:3] HW 1
        A has [2:1] HW 1
        A asks in epoch 3 from 1, after epoch 2
        B says 3:3; B [2:1 3:3] HW 1
        A has [2:1 3:3] HW 1
        in step
          B [2:1 3:3] HW 2
          A [2:1 3:3] HW 2
          C [2:1 3:3] HW 2
        """,
    story_kip_279_two_fast_failovers: """
        appointed: A leads epoch 2, ISR ABC
        A takes 1: A [2:1] HW 0
        in step
          A [2:1] HW 1
          B [2:1] HW 1
          C [2:1] HW 1
        A takes 2: A [2:1 2:2] HW 1
        appointed: B leads epoch 3, ISR ABC
        B takes 3 4: B [2:1 3:3 3:4] HW 1
        appointed: A leads epoch 4, ISR ABC
        A takes 5: A [2:1 2:2 4:5] HW 1
        B asks in epoch 4 from 3, after epoch 3
        A says that its epoch 2 ends at 2; A [2:1 2:2 4:5] HW 1
        B has [2:1] HW 1
        B asks in epoch 4 from 1, after epoch 2
        A says 2:2 4:5; A [2:1 2:2 4:5] HW 1
        B has [2:1 2:2 4:5] HW 1
        in step
          A [2:1 2:2 4:5] HW 3
          B [2:1 2:2 4:5] HW 3
          C [2:1 2:2 4:5] HW 3
        """,
    story_kip_320_question_of_an_older_epoch: """
        appointed: A leads epoch 2, ISR ABC
        A takes 1: A [2:1] HW 0
        in step
          A [2:1] HW 1
          B [2:1] HW 1
          C [2:1] HW 1
        A takes 2 3: A [2:1 2:2 2:3] HW 1
        B asks in epoch 2 from 1, after epoch 2
        A says 2:2 2:3; A [2:1 2:2 2:3] HW 1
        B has [2:1 2:2 2:3] HW 1
        B asks in epoch 2 from 3, after epoch 2
        appointed: C leads epoch 3, ISR C, eligible AB
        B asks in epoch 3 from 3, after epoch 2
        C says that its epoch 2 ends at 1; C [2:1] HW 1
        B has [2:1] HW 1
        appointed: A leads epoch 4, ISR AB
        A says that it leads epoch 4; A [2:1 2:2 2:3] HW 1
        A has or refuses 2 3: A [2:1 2:2 2:3] HW 1
        in step
          A [2:1 2:2 2:3] HW 3
          B [2:1 2:2 2:3] HW 3
        """,
    story_kip_320_answer_of_an_older_epoch: """
        appointed: A leads epoch 2, ISR ABC
        A takes 1: A [2:1] HW 0
        in step
          A [2:1] HW 1
          B [2:1] HW 1
          C [2:1] HW 1
        appointed: B leads epoch 3, ISR ABC
        B takes 9: B [2:1 3:9] HW 1
        appointed: A leads epoch 4, ISR ABC
        B asks in epoch 4 from 2, after epoch 3
        A says that its epoch 2 ends at 1; A [2:1] HW 1
        appointed: C leads epoch 5, ISR ABC
        C takes 2: C [2:1 5:2] HW 1
        in step
          C [2:1 5:2] HW 2
          A [2:1 5:2] HW 2
          B [2:1 5:2] HW 2
        B has [2:1 5:2] HW 2
        """,
    story_kip_966_last_replica_standing: """
        appointed: A leads epoch 2, ISR ABC
        A takes 1: A [2:1] HW 0
        in step
          A [2:1] HW 1
          B [2:1] HW 1
          C [2:1] HW 1
        A hears of B: A leads epoch 2, ISR AB
        A takes 2: A [2:1 2:2] HW 1
        in step
          A [2:1 2:2] HW 2
          B [2:1 2:2] HW 2
        A hears of nobody: A leads epoch 2, ISR A, eligible B
        A has or refuses 3: A [2:1 2:2] HW 2
        A restarts after a crash, its disk has lost 1: nobody leads epoch 2, ISR A, eligible B, unproven A
          A [2:1] HW 0
        C are there: nobody leads epoch 2, ISR A, eligible B, unproven A
        AC are there: nobody leads epoch 2, ISR A, eligible B, unproven A
        ABC are there: B leads epoch 3, ISR B, eligible A, unproven A
        in step
          B [2:1 2:2] HW 2
          A [2:1 2:2] HW 2
          C [2:1 2:2] HW 2
        B hears of AC: B leads epoch 3, ISR ABC
        """,
    story_moved_away_and_back: """
        appointed: A leads epoch 2, ISR ABC
        A takes 1: A [2:1] HW 0
        in step
          A [2:1] HW 1
          B [2:1] HW 1
          C [2:1] HW 1
        to be moved to ABD: A leads epoch 2, ISR ABC
        D asks in epoch 2 from 0, after epoch 0
        A says 2:1; A [2:1] HW 1
        D has [2:1] HW 1
        D asks in epoch 2 from 1, after epoch 2
        A says that there is no more; A [2:1] HW 1
        D has [2:1] HW 1
        A hears of BCD: A leads epoch 2, ISR ABCD
        C asks in epoch 2 from 1, after epoch 2
        ABD are there: A leads epoch 3, ISR ABD
          C [] HW 0
        in step
          A [2:1] HW 1
          B [2:1] HW 1
          D [2:1] HW 1
        to be moved to ABC: A leads epoch 3, ISR ABD
        A says that it leads epoch 3; A [2:1] HW 1
        A hears of BCD: A leads epoch 3, ISR ABD
        in step
          A [2:1] HW 1
          B [2:1] HW 1
          C [2:1] HW 1
          D [2:1] HW 1
        A hears of BCD: A leads epoch 3, ISR ABCD
        """,
}


@pytest.mark.parametrize("story", TOLD, ids=lambda story: story.__name__.removeprefix("story_"))
def test_story_is_as_told(story: Callable[[], Story]) -> None:
    assert story().text == dedent(TOLD[story]).strip()


WITHOUT_RULE: dict[str, tuple[Callable[[], Story], mutants.Patch]] = {
    "cut where the leader's epoch ends": (story_kip_279_two_fast_failovers, mutants.single_step),
    "questions of any epoch counted": (
        story_kip_320_question_of_an_older_epoch,
        mutants.replaced(leading, "judge", mutants.judge_any_epoch),
    ),
    "answers of any epoch believed": (
        story_kip_320_answer_of_an_older_epoch,
        mutants.replaced(FollowerReplica, "answered", mutants.follow_any_epoch),
    ),
    "who leaves below min_isr is forgotten": (
        story_kip_966_last_replica_standing,
        mutants.replaced(metadata, "with_isr", mutants.with_isr_and_nobody_eligible),
    ),
    "moved within an epoch": (
        story_moved_away_and_back,
        mutants.replaced(Metadata, "_finish_move", mutants.finish_move_in_same_epoch),
    ),
}


@pytest.mark.parametrize("name", WITHOUT_RULE)
def test_story_without_its_rule_ends_badly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    story, patch = WITHOUT_RULE[name]
    patch(monkeypatch)
    with pytest.raises(Violation):
        story()
