"""Stories of one stream told line by line: every step is done by hand, and says what came of it.

The brokers are those of the simulation (the real cores), the checker watches. A replica is shown as its records
(`epoch:message`), then its HW.
"""

from __future__ import annotations

from natslog.cluster.commands import (
    AppointLeaders,
    Appointment,
    Command,
    DisableReplicas,
    HoldReplicas,
    MoveReplicas,
    Proposal,
)
from natslog.cluster.roles import BeforeStart, Diverging, Fenced, Matching
from natslog.model import BrokerId, StreamRecord
from tests.sim.cluster_messages import Answer, Fetch
from tests.sim.cluster_process import NAME, STREAM
from tests.sim.cluster_stage import Stage, Walker
from tests.sim.world import World

LETTERS = "ABCDE"
SILENCE_MS = 5000.0


class Story(Stage):
    """Brokers A, B, C … keep the stream; A leads, in epoch 2. Nothing happens but what is told."""

    def __init__(self, *, replicas: int = 3, min_isr: int = 2, brokers: int | None = None) -> None:
        super().__init__(World(0), brokers=brokers or replicas, replicas=replicas, min_isr=min_isr)
        self.lines: list[str] = []
        self.appoint("A", LETTERS[:replicas])
        self.everyone_learns()

    @property
    def record(self) -> StreamRecord:
        return self.state.streams[NAME]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def of(self, letter: str) -> Walker:
        return self.brokers[number_of(letter)]

    def tell(self, line: str) -> None:
        self.lines.append(line)

    def log_of(self, letter: str) -> str:
        walker = self.of(letter)
        records = " ".join(f"{epoch}:{message}" for epoch, message in walker.log.records)
        high_watermark = walker.first.high_watermark if walker.first is not None else walker.log.checkpoint
        return f"{letter} [{records}] HW {high_watermark}"

    def tell_logs(self, letters: str) -> None:
        for letter in letters:
            self.tell(f"  {self.log_of(letter)}")

    # ---- the metadata ----

    def everyone_learns(self, letters: str = LETTERS) -> None:
        decided = -1
        while decided < len(self.commands):  # again, where a replica has proposed that its log exists
            decided = len(self.commands)
            for letter in letters[: len(self.brokers)]:
                self.learn(letter)

    def learn(self, letter: str) -> Walker:
        """All that was decided; what follows from it on its disk is done."""
        walker = self.of(letter)
        walker.learn(1000)
        self.finish(walker)
        if self.commit_holds():
            walker.learn(1000)
            self.finish(walker)
        return walker

    def commit_holds(self) -> bool:
        """What replicas propose when their logs have been created."""
        held = [one for one in self.in_flight if one[1] == "commit" and isinstance(one[2].command, HoldReplicas)]
        self.in_flight = [one for one in self.in_flight if one not in held]
        for _, _, proposal in held:
            self.commit(proposal)
        return bool(held)

    def do(self, command: Command) -> bool:
        """Through Raft. Returns whether it changed anything."""
        self.proposals += 1
        before = self.state.version
        self.commit(Proposal(id=f"story:{self.proposals}", command=command))
        return self.state.version > before

    def tell_record(self, what: str) -> None:
        record = self.record
        extras = [("eligible", record.eligible), ("unproven", record.unproven)]
        told = "".join(f", {word} {letters_of(numbers)}" for word, numbers in extras if numbers)
        leader = letters_of((record.leader,)) if record.leader else "nobody"
        self.tell(f"{what}: {leader} leads epoch {record.leader_epoch}, ISR {letters_of(record.isr)}{told}")

    def appoint(self, leader: str, isr: str) -> None:
        number = number_of(leader)
        appointment = Appointment(stream_id=STREAM, version=self.record.version, leader=number, isr=numbers_of(isr))
        assert self.do(AppointLeaders(appointments=(appointment,))), "an appointment that is refused is no story"
        self.tell_record("appointed")

    def decide(self, alive: str) -> None:
        """The controller, while these have a session, and have had the time to say where their logs end."""
        for letter in alive:
            walker = self.learn(letter)
            if walker.first is not None:
                walker.first.report()
        self.deliver("positioned")
        for _ in range(2):
            for proposal in self.proposed_by_controller(list(numbers_of(alive))):
                self.commit(proposal)
            self.world.now_ms += SILENCE_MS
        self.tell_record(f"{alive} are there")

    def change_isr(self, leader: str, heard: str) -> None:
        """The leader proposes what it finds, having heard of these only, and so it is done."""
        walker = self.of(leader)
        assert walker.first is not None
        self.world.now_ms += SILENCE_MS
        walker.contact_ms = dict.fromkeys(numbers_of(heard), self.world.now_ms)
        walker.first.tick()
        self.deliver("commit")
        self.learn(leader)
        self.tell_record(f"{leader} hears of {heard or 'nobody'}")

    def move(self, target: str) -> None:
        self.do(MoveReplicas(name=NAME, target=numbers_of(target)))
        self.tell_record(f"to be moved to {target}")

    def deliver(self, method: str) -> None:
        waiting, self.in_flight = self.in_flight, []
        for to, name, message in waiting:
            if name == method:
                self.arrive(to, name, message)

    # ---- records ----

    def publish(self, leader: str, *messages: int) -> None:
        walker = self.of(leader)
        end = len(walker.log.records)
        for message in messages:
            self.stream.publishes(message)
            walker.published(message)
            self.finish(walker)
        does = "takes" if len(walker.log.records) > end else "has or refuses"
        self.tell(f"{leader} {does} {' '.join(map(str, messages))}: {self.log_of(leader)}")

    def asks(self, follower: str) -> Fetch:
        question = self.ask(self.of(follower))
        assert question is not None, f"{follower} follows nobody"
        position = question.position
        self.tell(
            f"{follower} asks in epoch {position.epoch} from {position.offset}, after epoch {position.last_epoch}"
        )
        return question

    def hears(self, leader: str, question: Fetch) -> Answer:
        answer = self.answer(self.of(leader), question)
        assert answer is not None, f"{leader} leads nothing"
        self.tell(f"{leader} says {words_of(answer)}; {self.log_of(leader)}")
        return answer

    def takes(self, follower: str, answer: Answer) -> None:
        walker = self.of(follower)
        walker.answered(answer)
        self.finish(walker)
        self.in_flight.clear()
        self.tell(f"{follower} has {self.log_of(follower)[2:]}")

    def fetch(self, follower: str, leader: str) -> None:
        self.takes(follower, self.hears(leader, self.asks(follower)))

    def in_step(self, leader: str, followers: str) -> None:
        """Everyone fetches until all know that all have everything; told as its end."""
        lines, self.lines = self.lines, []
        for _ in range(4):
            for follower in followers:
                self.fetch(follower, leader)
        self.lines = lines
        self.tell("in step")
        self.tell_logs(leader + followers)

    # ---- lives ----

    def restart(self, letter: str, *, is_clean: bool = False, lost: int = 0) -> None:
        """`lost`: records that its disk had promised to keep."""
        old, log = self.of(letter), self.of(letter).log
        old.disk.clean_life = old.incarnation if is_clean else ""
        if lost:
            self.liar = number_of(letter)
            log.keep(log.synced - lost)
        walker = self.begin_life(number_of(letter))
        how = "in order" if is_clean else f"after a crash, its disk has lost {lost}" if lost else "after a crash"
        self.commit(walker.registration)
        self.tell_record(f"{letter} restarts {how}")
        self.tell_logs(letter)

    def find_damage(self, letter: str, end: int) -> None:
        """From `end` on nothing of its log can be read."""
        walker = self.of(letter)
        walker.log.is_damaged = True
        walker.log.keep(end)
        walker = self.begin_life(number_of(letter))
        self.commit(walker.registration)
        self.do(DisableReplicas(broker=walker.me, incarnation=walker.incarnation, stream_ids=(STREAM,)))
        self.tell_record(f"{letter} finds damage from {end} on")


def number_of(letter: str) -> BrokerId:
    return BrokerId(LETTERS.index(letter) + 1)


def numbers_of(letters: str) -> tuple[BrokerId, ...]:
    return tuple(number_of(letter) for letter in letters)


def letters_of(numbers: tuple[BrokerId, ...]) -> str:
    return "".join(LETTERS[number - 1] for number in sorted(numbers))


def words_of(answer: Answer) -> str:
    match answer.verdict:
        case Fenced(epoch=epoch):
            return f"that it leads epoch {epoch}"
        case Diverging(epoch=epoch, end_offset=end):
            return f"that its epoch {epoch} ends at {end}"
        case BeforeStart(log_start_offset=start):
            return f"that its log begins at {start}"
        case Matching():
            return " ".join(f"{epoch}:{message}" for epoch, message in answer.records) or "that there is no more"
