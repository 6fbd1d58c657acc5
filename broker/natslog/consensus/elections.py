"""How a leader is elected: a round of requests that changes no state (PreVote), then the vote, one per term.

A broker that is partitioned from the others only sends requests: its term does not increase, and it does not disturb
the others when it is connected again. A voter that received a message from a leader within the election timeout does
not answer either kind of request, unless that leader requested the election itself. Where the process of the leader
has ended (`member_ended`), no voter waits for that timeout; as a majority must notice it, the loss of one connection
deposes no leader. An answer with a higher term than the sender's makes the sender a follower of that term.

Source: Ongaro's thesis, 4.2.3, 6.4 and 9.6; etcd-io/raft `raft.go`.
"""

from __future__ import annotations

from natslog.consensus.leading import RaftLeader
from natslog.consensus.types import (
    AppendRequest,
    AppendResponse,
    Message,
    SnapshotChunk,
    Term,
    VoteRequest,
    VoteResponse,
)
from natslog.model import BrokerId

_TURN_TICKS = 2


class RaftElections(RaftLeader):
    """follower -> pre_candidate -> candidate -> leader, and from each of them back to follower."""

    def campaign(self) -> None:
        """Starts a pre-vote, as after a timeout. Does nothing if it may not become leader or is leader already."""
        if not self.may_campaign or self.role == "leader":
            return
        self.role, self.leader = "pre_candidate", None
        self._enter_role()
        self._ask_for_votes(Term(self.term + 1), is_pre=True)

    def member_ended(self, broker: BrokerId) -> None:
        """The kernel of this member's machine has closed the connection with it, and accepts no other one. If it led,
        this broker answers requests for votes from now on, and does not wait for its timeout. The voters campaign in
        turn, in the order of their ids, so that they do not divide their votes.
        """
        if broker != self.leader or self.role != "follower":
            return
        others = [voter for voter in self.membership.voters if voter != broker]
        self.leader, self._waited_ticks = None, 0
        if self.me in others:
            self._timeout_ticks = 1 + _TURN_TICKS * others.index(self.me)

    def _campaign_for_real(self, *, by_transfer: bool = False) -> None:
        self.term, self.vote = Term(self.term + 1), self.me
        self.role, self.leader = "candidate", None
        self._enter_role()
        self._ask_for_votes(self.term, is_pre=False, by_transfer=by_transfer)

    def _ask_for_votes(self, term: Term, *, is_pre: bool, by_transfer: bool = False) -> None:
        """Its own vote is one like the others': it counts when it is saved. A pre-vote needs no saving."""
        for voter in self.membership.voters:
            if voter != self.me:
                self._send(
                    VoteRequest(
                        sender=self.me,
                        to=voter,
                        term=term,
                        is_pre=is_pre,
                        last_index=self.log.last_index,
                        last_term=self.log.last_term,
                        by_transfer=by_transfer,
                    )
                )
        if is_pre:
            self._count_own_vote()

    def _count_own_vote(self) -> None:
        self._votes[self.me] = True
        self._tally()

    def _tick_follower(self) -> None:
        """Also of candidates: a candidate that is not elected in time sends its requests again."""
        self._waited_ticks += 1
        if self._waited_ticks < self._timeout_ticks:
            return
        if self.may_campaign:
            self.campaign()
        else:
            self.leader, self._waited_ticks = None, 0

    # -- requests for a vote

    def _on_vote_request(self, request: VoteRequest) -> None:
        granted = self._may_vote(request) and self._is_up_to_date(request)
        if granted and not request.is_pre:
            self.vote = request.sender
            self._waited_ticks = 0
        term = request.term if granted else self.term
        self._send(
            VoteResponse(sender=self.me, to=request.sender, term=term, is_pre=request.is_pre, granted=granted),
        )

    def _may_vote(self, request: VoteRequest) -> bool:
        """One vote per term; a repeated request gets the same vote. A pre-vote is not binding."""
        if request.is_pre and request.term > self.term:
            return True
        return self.vote == request.sender or (self.vote is None and self.leader is None)

    def _is_up_to_date(self, request: VoteRequest) -> bool:
        """A candidate that lacks entries of this broker may lack committed entries."""
        return (request.last_term, request.last_index) >= (self.log.last_term, self.log.last_index)

    def _on_vote_response(self, response: VoteResponse) -> None:
        expected = ("pre_candidate", self.term + 1) if response.is_pre else ("candidate", self.term)
        if not response.granted:
            expected = (expected[0], self.term)
        if (self.role, response.term) == expected:
            self._votes.setdefault(response.sender, response.granted)
            self._tally()

    def _tally(self) -> None:
        if self._is_quorum(lambda voter: self._votes.get(voter, False)):
            if self.role == "pre_candidate":
                self._campaign_for_real()
            else:
                self._lead()
        elif self._is_quorum(lambda voter: not self._votes.get(voter, True)):
            self._become_follower(self.term, None)

    def _on_timeout_now(self) -> None:
        """The leader transfers its leadership; its lease does not block this election."""
        if self.may_campaign and self.role == "follower":
            self._campaign_for_real(by_transfer=True)

    # -- terms

    def _on_higher_term(self, message: Message) -> bool:
        """Whether the message is to be processed. Pre-votes name a term that no broker is in yet."""
        match message:
            case VoteRequest(is_pre=is_pre, by_transfer=by_transfer):
                if self._is_led() and not by_transfer:
                    return False
                if not is_pre:
                    self._become_follower(message.term, None)
            case VoteResponse(is_pre=True, granted=True):
                pass
            case AppendRequest() | SnapshotChunk():
                self._become_follower(message.term, message.sender)
            case _:
                self._become_follower(message.term, None)
        return True

    def _is_led(self) -> bool:
        """Leads, or received something from a leader within an election timeout."""
        is_recent = self.leader is not None and self._now - self._leader_tick < self._election_ticks
        return self.role == "leader" or is_recent

    def _answer_lower_term(self, message: Message) -> None:
        """Informs the sender of the term: a former leader, or a candidate that cannot be elected.

        `round` stays 0: the answer must not confirm a read, should the sender lead this very term when it arrives.
        """
        match message:
            case AppendRequest() | SnapshotChunk():
                answer = AppendResponse(
                    sender=self.me,
                    to=message.sender,
                    term=self.term,
                    rejected=True,
                    index=self.log.last_index,
                    hint_term=self.log.last_term,
                )
                self._send(answer)
            case VoteRequest(is_pre=True):
                self._send(
                    VoteResponse(sender=self.me, to=message.sender, term=self.term, is_pre=True, granted=False),
                )
            case _:
                pass
