"""The leader's side of replication: the last request of each follower, and the new data for it.

Theory of operation. A session belongs to one link. A request names only positions that changed; unchanged streams cause
no traffic. When a stream gets new records, another HW or another leader, it becomes *due* in the sessions that follow
it; a request waits until a stream is due, and is answered in the call that has made it due if that can be done without
a read in a thread (`begun`). A new HW alone waits a moment, to be sent together with records. A position
that only confirms the records that were just sent makes no stream due: there is nothing to say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from natslog.arrow import ipc
from natslog.arrow.row_buffers import Buffer
from natslog.cluster.roles import Fenced, FetchPosition, LeaderReplica, Matching, Verdict
from natslog.errors import CorruptLog, NatslogError
from natslog.log import ReplicaLog
from natslog.log.batch_encoder import EncodedBatch
from natslog.log.segment import read_at
from natslog.model import BrokerId, Epoch, StreamId
from natslog.node.begun import begin
from natslog.node.peers.messages import FetchAnswer, FetchRequest, FetchResponse
from natslog.node.replicas.replicated_log import ReplicatedLog

Reply = Callable[[FetchResponse, Sequence[Buffer]], None]

_WAIT_S = 0.5
_EXPECTED_WAIT_S, _EXPECTED_WITHIN_S = 0.02, 1.0
_HIGH_WATERMARK_WAITS_S = 0.01
_PAUSE_FACTOR = 2.0
_PAUSE_AT_MOST_S = 1.0
_GROWTH_OVER_S = 3.0
_OUTPACED_HOLDS_S = 2.0
_READ_AGAIN_S = 1.0


@dataclass(slots=True)
class _Part:
    """The last part that a replica out of sync requested: the time of the request, the time of its turn, the log end,
    and the size of the part.

    `growth_bytes_per_s`: of the log, over the last seconds: runs make it grow in bursts. `is_outpaced`: it cannot catch
    up as fast as it should, even without a pause.
    """

    asked_s: float
    due_s: float
    appended_bytes: int
    growth_bytes_per_s: float = 0.0
    is_outpaced: bool = False
    got_bytes: int = 0

    def growth_until(self, now_s: float, appended_bytes: int) -> float:
        passed_s = max(now_s - self.asked_s, 1e-6)
        share = min(1.0, passed_s / _GROWTH_OVER_S) if self.growth_bytes_per_s else 1.0
        latest = (appended_bytes - self.appended_bytes) / passed_s
        return self.growth_bytes_per_s + share * (latest - self.growth_bytes_per_s)

    def pause_s(self, now_s: float, growth_bytes_per_s: float) -> float:
        """The pause after it: twice as long as the part took, so that replicas in sync keep their rate. The pause is
        shorter if necessary, so that the replica catches up as fast as the log grows: it has then caught up in the time
        for which it was down.
        """
        took_s = now_s - self.due_s
        pause_s = min(_PAUSE_FACTOR * took_s, _PAUSE_AT_MOST_S)
        if growth_bytes_per_s:
            pause_s = min(pause_s, self.got_bytes / (2 * growth_bytes_per_s) - took_s)
        return max(pause_s, 0.0)


class FetchSession:
    """One follower's link.

    Args:
        find: a log by its id, where it is open here.
        spawn: makes a task of work, with this name; an error of it is a bug.
    """

    def __init__(
        self,
        follower: BrokerId,
        find: Callable[[StreamId], ReplicatedLog | None],
        executor: Executor,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self.follower = follower
        self.incarnation = ""
        self.last_contact_s = time.monotonic()
        self._find = find
        self._executor, self._spawn = executor, spawn
        self._positions: dict[StreamId, FetchPosition] = {}
        self._due: dict[StreamId, None] = {}
        self._due_later: set[StreamId] = set()
        self._catching_up: dict[StreamId, _Part] = {}
        self._sent_by: dict[StreamId, LeaderReplica] = {}  # who sent records, until the next position is known
        self._sent_until: dict[StreamId, int] = {}  # the end of what was sent before it was synced, until then
        self._complete: dict[StreamId, LeaderReplica] = {}  # who has found that the follower has all there was
        self._expected: dict[StreamId, float] = {}  # the position in each of these, until then
        self._held: tuple[FetchRequest, Reply] | None = None  # until a stream is due
        self._held_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due_later_from_s = 0.0  # when the first of them was marked
        self._high_watermark_timer: asyncio.TimerHandle | None = None
        self._is_answer_due = False

    def expect(self, log_id: StreamId) -> None:
        """This broker leads the stream from now on. The follower says where it is in its next request: until it has,
        none is held for long. What it has asked too early is answered now.
        """
        self._expected[log_id] = time.monotonic() + _EXPECTED_WITHIN_S
        self._make_due(log_id)
        asyncio.get_running_loop().call_soon(self._answer_held)

    def _wait_s(self) -> float:
        """For how long a request is held while no stream is due."""
        if not self._expected:
            return _WAIT_S
        now_s = time.monotonic()
        self._expected = {log_id: until_s for log_id, until_s in self._expected.items() if until_s > now_s}
        return _EXPECTED_WAIT_S if self._expected else _WAIT_S

    def mark(self, log_id: StreamId, *, has_records: bool, end_offset: int | None = None) -> None:
        """A stream has new data: records, or only another HW.

        Args:
            end_offset: of the log now; None: it has not changed.
        """
        if log_id not in self._positions or log_id in self._due or log_id in self._catching_up:
            return
        if end_offset is not None and self._sent_until.get(log_id) == end_offset:
            return
        if has_records:
            self._due_later.discard(log_id)
            self._due[log_id] = None
            self._answer_soon()
        elif log_id not in self._due_later:
            loop = asyncio.get_running_loop()
            if not self._due_later:
                self._due_later_from_s = loop.time()
            self._due_later.add(log_id)
            if self._high_watermark_timer is None:
                self._high_watermark_timer = loop.call_later(_HIGH_WATERMARK_WAITS_S, self._send_high_watermarks)

    def send_written(self, replicated: ReplicatedLog, batch: EncodedBatch) -> bool:
        """Sends a commit that is not synced here yet, if the follower has everything before it, and waits for more.
        Returns whether it was sent.
        """
        held, leading, log = self._held, replicated.leading, replicated.log
        position, header = self._positions.get(replicated.id), batch.header
        if held is None or self._due or position is None or self._complete.get(replicated.id) is not leading:
            return False
        if leading is None or position.offset != header.base_offset:
            return False
        self._held = None
        self._sent_by[replicated.id], self._sent_until[replicated.id] = leading, header.end_offset
        self._due_later.discard(replicated.id)
        answer = FetchAnswer(
            replicated.id,
            leading.epoch,
            Matching(),
            replicated.high_watermark,
            log.first_readable_offset,
            header.total_bytes,
            log.ids.kept.serial,
        )
        (request, reply) = held
        reply(FetchResponse(request.number, (answer,)), batch.pieces)
        return True

    def _send_high_watermarks(self) -> None:
        """One timer serves many of them: most are sent with records before it ends."""
        self._high_watermark_timer, loop = None, asyncio.get_running_loop()
        due_s = self._due_later_from_s + _HIGH_WATERMARK_WAITS_S
        if self._due_later and loop.time() < due_s:
            self._high_watermark_timer = loop.call_at(due_s, self._send_high_watermarks)
            return
        self._due |= dict.fromkeys(self._due_later)
        self._due_later.clear()
        self.answer()

    def serve(self, request: FetchRequest, reply: Reply) -> None:
        """Takes the positions of the request, which may move HW: what waits for that is acked in this call.

        Args:
            reply: is called with the answer, when a stream is due; with an empty one after half a second, or sooner
                (`expect`). Not for a request that another one follows before.
        """
        self.last_contact_s = time.monotonic()
        self.incarnation = request.incarnation
        for log_id in request.forget:
            self._positions.pop(log_id, None)
            self._sent_by.pop(log_id, None)
            self._complete.pop(log_id, None)
            self._due.pop(log_id, None)
            if (replicated := self._find(log_id)) is not None:
                replicated.sessions.discard(self)
        for log_id, position in request.changed:
            self._positions[log_id] = position
            if self._only_confirms(log_id, position, self._note_position(log_id, position)):
                if self._catching_up.pop(log_id, None) is not None:
                    self.mark(log_id, has_records=False)  # what was not noted meanwhile
                continue
            if (pause_s := self._pause_s(log_id, position)) > 0:
                asyncio.get_running_loop().call_later(pause_s, self._make_due, log_id)
            else:
                self._due[log_id] = None
        self._held = (request, reply)
        if self._due:
            self.answer()
        else:
            self._hold()

    def _hold(self) -> None:
        """One timer serves many requests: it looks at the newest."""
        loop = asyncio.get_running_loop()
        self._held_until_s = loop.time() + self._wait_s()
        if self._timer is not None and self._timer.when() > self._held_until_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = loop.call_at(self._held_until_s, self._check_held)

    def _check_held(self) -> None:
        self._timer, loop = None, asyncio.get_running_loop()
        if self._held is not None and loop.time() < self._held_until_s:
            self._timer = loop.call_at(self._held_until_s, self._check_held)
        else:
            self._answer_held()

    def _answer_soon(self) -> None:
        """In the next turn of the event loop: more streams may become due in this one."""
        if self._held is not None and not self._is_answer_due:
            self._is_answer_due = True
            asyncio.get_running_loop().call_soon(self.answer)

    def answer(self) -> None:
        """Answers the request that is held, if there is one, and a stream is due."""
        self._is_answer_due = False
        if self._due:
            self._answer_held()

    def _answer_held(self) -> None:
        if self._held is not None:
            (request, reply), self._held = self._held, None
            begin(self._answer_request(request, reply), "serving a fetch", self._spawn)

    async def _answer_request(self, request: FetchRequest, reply: Reply) -> None:
        reply(*await self._gathered(request))

    def _pause_s(self, log_id: StreamId, position: FetchPosition) -> float:
        """The pause before the next part of a replica that catches up; 0 for one that is in sync, or nearly, or that
        writes wait for.
        """
        replicated, last = self._find(log_id), self._catching_up.pop(log_id, None)
        leading = None if replicated is None else replicated.leading
        if replicated is None or leading is None or self.follower in leading.counted:
            return 0.0
        is_near = replicated.is_at_tail(position.offset) or position.offset >= replicated.log.log_end_offset
        if is_near or len(replicated.record.isr) < replicated.record.settings.min_isr:
            return 0.0
        now_s, appended_bytes = time.monotonic(), replicated.log.appended_bytes
        growth = 0.0 if last is None else last.growth_until(now_s, appended_bytes)
        pause_s = 0.0 if last is None else last.pause_s(now_s, growth)
        is_outpaced = growth > 0 and not pause_s
        self._catching_up[log_id] = _Part(now_s, now_s + pause_s, appended_bytes, growth, is_outpaced)
        return pause_s

    def is_outpaced(self, log_id: StreamId) -> bool:
        """Whether the follower catches up with the stream too slowly because the log grows as fast as it can copy."""
        part = self._catching_up.get(log_id)
        return part is not None and part.is_outpaced and time.monotonic() - part.asked_s < _OUTPACED_HOLDS_S

    def _make_due(self, log_id: StreamId) -> None:
        if log_id in self._positions:
            self._due[log_id] = None
            self._answer_soon()

    def _note_position(self, log_id: StreamId, position: FetchPosition) -> Verdict | None:
        """The follower's position may move HW, before anything is read for it. None: not led here."""
        replicated = self._find(log_id)
        if replicated is None or replicated.leading is None:
            return None
        self._expected.pop(log_id, None)
        replicated.sessions.add(self)
        self._complete.pop(log_id, None)
        self._sent_until.pop(log_id, None)
        verdict = replicated.fetched(self.follower, position, self.incarnation)
        leading = replicated.leading
        is_complete = isinstance(verdict, Matching) and position.offset == replicated.log.written_end_offset
        if leading is not None and is_complete:
            self._complete[log_id] = leading
        return verdict

    def _only_confirms(self, log_id: StreamId, position: FetchPosition, verdict: Verdict | None) -> bool:
        """Whether this is where the records end that were just sent, and so does the log."""
        leading, replicated = self._sent_by.pop(log_id, None), self._find(log_id)
        return (
            leading is not None
            and isinstance(verdict, Matching)
            and replicated is not None
            and replicated.leading is leading
            and replicated.log.log_end_offset == position.offset
        )

    async def _gathered(self, request: FetchRequest) -> tuple[FetchResponse, list[bytes]]:
        answers: list[FetchAnswer] = []
        payload: list[bytes] = []
        room = request.max_bytes
        for log_id in list(self._due):  # each once: new records meanwhile are for the next request
            if room <= 0:
                break
            self._due.pop(log_id, None)
            self._due_later.discard(log_id)
            answer, data = await self._answer(log_id, room)
            if answer is not None:
                answers.append(answer)
                payload += data
                room -= answer.length + 64
        return FetchResponse(request.number, tuple(answers)), payload

    async def _answer(self, log_id: StreamId, room_bytes: int) -> tuple[FetchAnswer | None, list[bytes]]:
        position = self._positions.get(log_id)
        if position is None:
            return None, []
        replicated = self._find(log_id)
        if replicated is None or replicated.leading is None:
            return FetchAnswer(log_id, Epoch(0), Fenced(Epoch(0)), 0, 0), []
        replicated.sessions.add(self)
        leading, log = replicated.leading, replicated.log
        verdict = replicated.judged(position)
        data: list[bytes] = []
        if isinstance(verdict, Matching) and position.offset < log.log_end_offset:
            if replicated.is_at_tail(position.offset):
                data = self._records(replicated, position.offset, room_bytes)
            else:
                loop = asyncio.get_running_loop()
                data = await loop.run_in_executor(
                    self._executor, self._records, replicated, position.offset, room_bytes
                )
                if (part := self._catching_up.get(log_id)) is not None:
                    part.got_bytes = sum(len(piece) for piece in data)
                if replicated.leading is not leading:  # the data read may belong to another leader by now
                    return FetchAnswer(log_id, Epoch(0), Fenced(Epoch(0)), 0, 0), []
            if data:
                self._sent_by[log_id] = leading
            else:
                asyncio.get_running_loop().call_later(_READ_AGAIN_S, self._make_due, log_id)
        return (
            FetchAnswer(
                log_id,
                leading.epoch,
                verdict,
                replicated.high_watermark,
                log.first_readable_offset,
                sum(len(piece) for piece in data),
                log.ids.kept.serial,
            ),
            data,
        )

    @staticmethod
    def _records(replicated: ReplicatedLog, start: int, max_bytes: int) -> list[bytes]:
        """As `records_from`. Empty if they cannot be read now."""
        try:
            return records_from(replicated.log, start, max_bytes)
        except CorruptLog as error:
            replicated.note_damage(error)
            return []
        except (NatslogError, OSError):
            return []  # for example removed by retention

    def close(self) -> None:
        for log_id in self._positions:
            if (replicated := self._find(log_id)) is not None:
                replicated.sessions.discard(self)
        self._positions.clear()
        self._held = None
        for timer in (self._timer, self._high_watermark_timer):
            if timer is not None:
                timer.cancel()


def records_from(log: ReplicaLog, start: int, max_bytes: int) -> list[bytes]:
    """Whole batches from `start` on, as they are in the files, committed or not; one that begins below `start` is cut
    there.

    Args:
        max_bytes: as `plan_read`.
    """
    if (recent := log.recent.stored(start, log.log_end_offset)) is not None:
        return [recent]
    with log.reader.plan_read(start, max_bytes=max_bytes, uncommitted=True) as plan:
        pieces = [read_at(piece.fd, piece.position, piece.length) for piece in plan.ranges]
        if pieces and plan.ranges[0].start < start:
            pieces[0] = _cut_before(pieces[0], start)
        return pieces


def _cut_before(data: bytes, start: int) -> bytes:
    """Encoded batches without the first one's rows below `start`."""
    header = ipc.proven_header(data[: ipc.MAX_HEADER_BYTES])
    if header is None:
        return data
    cut = ipc.clip_batch(data[: header.total_bytes], start, header.end_offset)
    return bytes(cut) + data[header.total_bytes :]
