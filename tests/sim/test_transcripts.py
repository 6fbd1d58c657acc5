"""Named scenarios told by hand, line by line, with the real cores: KIP-101, KIP-279, KIP-320, KIP-966, and "Jepsen: NATS
2.12.1". A change of behaviour is a diff of a story. Where one rule makes the difference, the story is told without it too,
and the checker must object.
"""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

import pytest

from natslog.cluster import metadata, replica
from natslog.cluster.metadata import Metadata
from natslog.cluster.replica import FollowerReplica
from tests.sim import cluster_mutants as mutants
from tests.sim.cluster_process import NAME
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
    """B led one epoch that nobody followed; A never heard of it. B walks back to where both agree."""
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
    """C's files go, and it is moved back while what it asked before still lies about (also: the kind of membership change
    that loses acked records of JetStream, nats-server issue 7545; changes of Raft's own members are test_raft's).
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
    sync; even where one disk lied about it, a majority of the others' logs is asked before anybody leads. The same story
    is that of processes killed all at once, after which JetStream 2.10.22 had no stream any more (issue 6888): metadata
    is on disk before it is answered for (tests/unit/node/test_raft_store.py), and so the record is still there.
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
    """One node loses its tail; before, B stood still, and after, A and E do: with D they would know, without it nobody can
    (issue 7567: JetStream went on with two histories). B and C wait for D; then B, C and D have what was acked.
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
    "cut where the leader's epoch ends": (story_kip_279_two_fast_failovers, mutants.single_step),
    "questions of any epoch counted": (
        story_kip_320_question_of_an_older_epoch,
        mutants.replaced(replica, "judge", mutants.judge_any_epoch),
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
    absence deletes nothing, only a tombstone does. (Damaged metadata stops the broker: tests/unit/node/test_raft_store.py;
    a damaged snapshot is not installed: "installs damage" in test_raft_mutations.)
    """
    story = Story()
    story.publish("A", 1, 2)
    story.in_step("A", "BC")
    walker = story.of("B")
    del walker.state.streams[NAME]
    walker.look_at_record()
    walker.tick()
    assert story.log_of("B") == "B [2:1 2:2] HW 2"
