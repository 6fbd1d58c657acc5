"""How a follower processes a leader's log: it appends matching entries, names where the logs may agree, and installs
snapshots.
"""

from __future__ import annotations

from crc32c import crc32c

from natslog.consensus.membership import MembershipHistory
from natslog.consensus.state import IncomingSnapshot, RaftState
from natslog.consensus.types import (
    AppendRequest,
    AppendResponse,
    Entry,
    Index,
    Snapshot,
    SnapshotChunk,
    SnapshotResponse,
    Term,
)


class RaftFollower(RaftState):
    """Answers depend on the data that the same Ready saves, and are sent after it."""

    def _on_append_request(self, request: AppendRequest) -> None:
        self._received_from_leader(request.sender)
        end = Index(request.prev_index + len(request.entries))
        if request.prev_index < self.log.commit:  # a repetition, at least in part: what is committed agrees
            self._take(request.entries[self.log.commit - request.prev_index :])
            self._accept(request, Index(max(end, self.log.commit)))
        elif self._agrees_at(request.prev_index, request.prev_term):
            self._take(request.entries)
            self._accept(request, end)
        else:
            self._reject(request)

    def _agrees_at(self, index: Index, term: Term) -> bool:
        """If two logs agree at one index, they agree at all lower ones."""
        return self.log.term_at(index) == term

    def _take(self, entries: tuple[Entry, ...]) -> None:
        """Existing entries remain, and so do entries after them: an old message must not remove newer entries."""
        conflict = self.log.find_conflict(entries)
        if conflict is not None:
            self._append(entries[conflict:])

    def _accept(self, request: AppendRequest, index: Index) -> None:
        self.log.commit_to(Index(min(request.commit, index)))
        self._answer_append(request, rejected=False, index=index, hint_term=Term(0))

    def _reject(self, request: AppendRequest) -> None:
        hint = self.log.find_by_term(request.prev_index, request.prev_term)
        self._answer_append(request, rejected=True, index=hint, hint_term=self.log.term_at(hint) or Term(0))

    def _answer_append(self, request: AppendRequest, *, rejected: bool, index: Index, hint_term: Term) -> None:
        self._send(
            AppendResponse(
                sender=self.me,
                to=request.sender,
                term=self.term,
                rejected=rejected,
                index=index,
                hint_term=hint_term,
                round=request.round,
            )
        )

    def _on_snapshot_chunk(self, chunk: SnapshotChunk) -> None:
        self._received_from_leader(chunk.sender)
        if self._has_all_of(chunk):
            self._incoming = None
            self._answer_chunk(chunk, chunk.total_bytes, done=True)
            return
        incoming = self._incoming_for(chunk)
        if chunk.position != len(incoming.data):
            self._answer_chunk(chunk, len(incoming.data))
            return
        incoming.data += chunk.data
        if len(incoming.data) < chunk.total_bytes:
            self._answer_chunk(chunk, len(incoming.data))
            return
        self._incoming = None
        is_whole = self._is_undamaged(bytes(incoming.data), chunk.crc)
        if is_whole:
            self._install(chunk, bytes(incoming.data))
        self._answer_chunk(chunk, chunk.total_bytes if is_whole else 0, done=is_whole)

    def _has_all_of(self, chunk: SnapshotChunk) -> bool:
        """Whether the log reaches as far by itself. Where it agrees at the snapshot's place, that much is committed."""
        if chunk.index > self.log.commit and self._agrees_at(chunk.index, chunk.index_term):
            self.log.commit_to(chunk.index)
        return chunk.index <= self.log.commit

    def _incoming_for(self, chunk: SnapshotChunk) -> IncomingSnapshot:
        """The received part of the snapshot that this chunk belongs to; empty for another snapshot."""
        now = self._incoming
        of_chunk = (chunk.index, chunk.index_term, chunk.total_bytes, chunk.crc)
        if now is None or (now.index, now.term, now.total_bytes, now.crc) != of_chunk:
            now = self._incoming = IncomingSnapshot(*of_chunk, data=bytearray())
        return now

    def _is_undamaged(self, data: bytes, crc: int) -> bool:
        return crc32c(data) == crc

    def _install(self, chunk: SnapshotChunk, data: bytes) -> None:
        snapshot = Snapshot(index=chunk.index, term=chunk.index_term, membership=chunk.membership, data=data)
        self.log.restore(snapshot)
        self._history = MembershipHistory(snapshot)

    def _answer_chunk(self, chunk: SnapshotChunk, position: int, *, done: bool = False) -> None:
        self._send(
            SnapshotResponse(
                sender=self.me,
                to=chunk.sender,
                term=self.term,
                index=chunk.index,
                position=position,
                done=done,
                round=chunk.round,
            )
        )
