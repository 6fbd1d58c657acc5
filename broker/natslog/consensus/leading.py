"""The tasks of a leader: it replicates its log to every member, commits entries that a quorum stores, confirms reads.

Answers only change the state of a member; `_replicate_all` sends all pending entries, once for each Ready, so that many
proposals are sent in one append. Heartbeats start from an index at which the member certainly agrees and are therefore
never refused. A lost message is detected when appends are not answered for two heartbeats.
"""

from __future__ import annotations

from crc32c import crc32c

from natslog.consensus.following import RaftFollower
from natslog.consensus.progress import Progress, SnapshotTransfer
from natslog.consensus.state import ConfirmedRead
from natslog.consensus.types import (
    AppendRequest,
    AppendResponse,
    Entry,
    Index,
    SnapshotChunk,
    SnapshotResponse,
    Term,
    TimeoutNow,
)
from natslog.model import BrokerId


class RaftLeader(RaftFollower):
    """Role `leader`. Its own log counts as stored as far as the last `advance` says."""

    def _lead(self) -> None:
        """Opens the term with an empty entry: entries of older terms are committed through it, and never by
        counting.
        """
        self.role, self.leader = "leader", self.me
        self._enter_role()
        self._leader_tick = self._now
        self._follow_members()
        self._append([Entry(Index(self.last_index + 1), self.term, "empty")])

    def _follow_members(self) -> None:
        """One `Progress` for each other member in force; a member with another data folder starts from nothing."""
        known, self._progress = self._progress, {}
        for member in self.membership.members:
            if member.id == self.me:
                continue
            progress = known.get(member.id)
            if progress is None or progress.directory != member.directory:
                next_index = Index(self.last_index + 1)
                progress = Progress(next_index=next_index, directory=member.directory, since_tick=self._now)
            self._progress[member.id] = progress

    # -- time

    def _tick_leader(self) -> None:
        if self._successor is not None and self._now - self._successor_tick >= self._election_ticks:
            self._successor = None
        if not self._has_active_quorum():
            self._become_follower(self.term, None)
            return
        self._leader_tick = self._now
        self._waited_ticks += 1
        if self._waited_ticks >= self._heartbeat_ticks:
            self._waited_ticks = 0
            self._heartbeat_all()

    def _has_active_quorum(self) -> bool:
        """CheckQuorum: whether a majority answered within an election timeout, or this leader was elected more
        recently.
        """
        since = self._now - self._election_ticks

        def is_active(broker: BrokerId) -> bool:
            progress = self._progress.get(broker)
            return progress is None or progress.was_active(since) or progress.since_tick > since

        return self._is_quorum(is_active)

    def _heartbeat_all(self) -> None:
        stalled_before = self._now - 2 * self._heartbeat_ticks
        for broker, progress in self._progress.items():
            if progress.was_active(stalled_before):
                progress.paused = False
            if progress.is_stalled(stalled_before):
                progress.become_probe(Index(progress.match_index + 1))
            if progress.transfer is not None and progress.transfer.sent_tick <= stalled_before:
                self._send_chunk(broker, progress.transfer)
            self._send_heartbeat(broker, progress)

    # -- sending

    def _replicate_all(self) -> None:
        """Sends members all entries that they lack and that may be sent now."""
        for broker, progress in self._progress.items():
            while progress.may_send and progress.lacks(self.last_index):
                self._send_append(broker, progress)
            if progress.commit_sent < min(self.commit, progress.match_index):
                self._send_heartbeat(broker, progress)

    def _send_append(self, broker: BrokerId, progress: Progress) -> None:
        """Entries from the member's position on, or the snapshot if these entries were compacted."""
        prev_index = Index(progress.next_index - 1)
        prev_term = self.log.term_at(prev_index)
        if prev_term is None:
            self._send_snapshot(broker, progress)
            return
        entries: tuple[Entry, ...] = ()
        if prev_index < self.last_index:
            entries = self.log.slice(progress.next_index, max_bytes=self._max_append_bytes)
        end = Index(prev_index + len(entries))
        self._send_request(broker, prev_index, prev_term, entries)
        progress.sent(end, self._now)
        if progress.state == "replicate":
            progress.commit_sent = Index(min(self.commit, end))

    def _send_heartbeat(self, broker: BrokerId, progress: Progress) -> None:
        prev_index = progress.match_index
        prev_term = self.log.term_at(prev_index)
        if prev_term is None:  # compacted: the beginning of all logs agrees too
            prev_index, prev_term = Index(0), Term(0)
        progress.commit_sent = Index(min(self.commit, progress.match_index))
        self._send_request(broker, prev_index, prev_term, ())

    def _send_request(self, to: BrokerId, prev_index: Index, prev_term: Term, entries: tuple[Entry, ...]) -> None:
        self._send(
            AppendRequest(
                sender=self.me,
                to=to,
                term=self.term,
                prev_index=prev_index,
                prev_term=prev_term,
                entries=entries,
                commit=self.commit,
                round=self._round,
            )
        )

    def _send_snapshot(self, broker: BrokerId, progress: Progress) -> None:
        snapshot = self.log.snapshot
        transfer = SnapshotTransfer(snapshot=snapshot, crc=crc32c(snapshot.data), sent_tick=self._now)
        progress.become_snapshot(transfer)
        self._send_chunk(broker, transfer)

    def _send_chunk(self, broker: BrokerId, transfer: SnapshotTransfer) -> None:
        transfer.sent_tick = self._now
        snapshot = transfer.snapshot
        self._send(
            SnapshotChunk(
                sender=self.me,
                to=broker,
                term=self.term,
                index=snapshot.index,
                index_term=snapshot.term,
                membership=snapshot.membership,
                position=transfer.position,
                total_bytes=len(snapshot.data),
                crc=transfer.crc,
                data=snapshot.data[transfer.position : transfer.position + self._chunk_bytes],
                round=self._round,
            )
        )

    # -- answers

    def _on_append_response(self, response: AppendResponse) -> None:
        progress = self._progress.get(response.sender)
        if progress is None or self.role != "leader":
            return
        progress.answered(self._now, response.round)
        if response.rejected:
            self._on_rejected(progress, response)
        elif progress.accepted(response.index, self._now):
            self._on_match(response.sender, progress)
        self._confirm_reads()

    def _on_rejected(self, progress: Progress, response: AppendResponse) -> None:
        """A hint below an index that the member has stored is outdated (or comes from a member that lost its log, which
        cannot be helped here).
        """
        if progress.state != "snapshot" and response.index >= progress.match_index:
            progress.rejected(self.log.find_by_term(response.index, response.hint_term))

    def _on_snapshot_response(self, response: SnapshotResponse) -> None:
        progress = self._progress.get(response.sender)
        if progress is None or self.role != "leader":
            return
        progress.answered(self._now, response.round)
        transfer = progress.transfer
        if transfer is not None and transfer.snapshot.index == response.index:
            if response.done:  # from here with entries; with a newer snapshot, where those were compacted meanwhile
                progress.become_probe(Index(max(progress.match_index, response.index) + 1))
                progress.accepted(response.index, self._now)
                self._on_match(response.sender, progress)
            elif response.position != transfer.position and response.position <= len(transfer.snapshot.data):
                transfer.position = response.position
                self._send_chunk(response.sender, transfer)
        self._confirm_reads()

    def _on_match(self, broker: BrokerId, progress: Progress) -> None:
        if progress.state == "snapshot" and self.log.term_at(progress.match_index) is not None:
            progress.become_probe(Index(progress.match_index + 1))
            progress.accepted(progress.match_index, self._now)
        self._commit_stored()
        if broker == self._successor and progress.match_index == self.last_index:
            self._send(TimeoutNow(sender=self.me, to=broker, term=self.term))

    # -- committing

    def _commit_stored(self) -> None:
        """Commits entries that a quorum stores, and steps down if the leader itself was removed."""
        index = self._quorum_index()
        if index <= self.commit or not self._may_commit(index):
            return
        self.log.commit_to(index)
        if not self.is_voter and self._history.latest_index <= self.commit:
            self._replicate_all()
            self._resign()

    def _quorum_index(self) -> Index:
        """The highest index that a majority of the voters stores."""
        matches = sorted(map(self.match_of, self.membership.voters), reverse=True)
        return matches[len(matches) // 2]

    def _may_commit(self, index: Index) -> bool:
        """Only entries of the own term are committed by counting; those before them follow (the paper's figure 8)."""
        return self.log.term_at(index) == self.term

    def _resign(self) -> None:
        """Removed: the voter with the longest log need not wait for its timeout."""
        best = max(self.membership.voters, key=self.match_of)
        self._send(TimeoutNow(sender=self.me, to=best, term=self.term))
        self._become_follower(self.term, None)

    # -- reading

    def _has_committed_in_term(self) -> bool:
        """Before that, a leader has no information how far its predecessors committed."""
        return self.log.term_at(self.commit) == self.term

    def _begin_reads(self) -> None:
        """One heartbeat round for all reads that came since the last Ready."""
        new = [read for read in self._reads if read.round is None]
        if not new or not self._has_committed_in_term():
            return
        self._round += 1
        for read in new:
            read.index, read.round = self.commit, self._round
        for broker, progress in self._progress.items():
            self._send_heartbeat(broker, progress)
        self._confirm_reads()

    def _confirm_reads(self) -> None:
        """A member that answered a round still followed this leader when the round began."""
        while self._reads and (round := self._reads[0].round) is not None and self._is_round_answered(round):
            read = self._reads.pop(0)
            assert read.index is not None, "a read has its index when its round begins"
            self._confirmed.append(ConfirmedRead(context=read.context, index=read.index))

    def _is_round_answered(self, round: int) -> bool:
        return self._is_quorum(lambda broker: broker == self.me or self._progress[broker].round >= round)
