"""Decoding and encoding of entries of the metadata log: entries that this version cannot read are never accepted, and
the metadata leader adds its time to entries that it appends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from natslog.cluster.commands import FinalizeUpgrade, Proposal
from natslog.cluster.encoding import decode_proposal, decode_state, written_by_newer
from natslog.consensus import AppendRequest, Entry, Index, Message, Snapshot, Term
from natslog.consensus.membership import decode_membership


@dataclass(frozen=True, slots=True)
class Request:
    """The client of a change, the id that is the same in a repeated request, and the address that it came from."""

    id: str
    client: str
    address: str = ""


def check_entries(entries: Iterable[Entry]) -> None:
    """Raises UpgradeRequired: a command, or a field of it, is of a newer version."""
    for entry in entries:
        if entry.kind == "command":
            decode_proposal(entry.data)
        elif entry.kind == "membership":
            try:
                decode_membership(entry.data)
            except (ValueError, RecursionError) as error:
                raise written_by_newer("a membership in the metadata log", error) from error


def check_message(message: Message) -> None:
    """Raises UpgradeRequired: its entries must not be stored here."""
    if isinstance(message, AppendRequest):
        check_entries(message.entries)


def commands_of(entries: Iterable[Entry]) -> list[tuple[Index, Proposal]]:
    """Each with the index of its entry. Raises UpgradeRequired."""
    return [(entry.index, decode_proposal(entry.data)) for entry in entries if entry.kind == "command"]


def highest_level(snapshot: Snapshot | None, commands: Iterable[tuple[Index, Proposal]]) -> int:
    """The feature level that the snapshot or one of the commands brings; 0 where they do not change it.

    Raises:
        UpgradeRequired: the snapshot is of a newer version.
    """
    level = 0 if snapshot is None else decode_state(snapshot.data).feature_level
    for _, proposal in commands:
        if isinstance(proposal.command, FinalizeUpgrade):
            level = max(level, proposal.command.level)
    return level


class ElapsedTime:
    """What the metadata leader writes into proposals: milliseconds since its last one in this term."""

    def __init__(self) -> None:
        self._term: Term | None = None
        self._dated_ms = 0

    def dated(self, proposal: Proposal, now_ms: float) -> Proposal:
        elapsed_ms = int(now_ms) - self._dated_ms if self._term is not None else 0
        return msgspec.structs.replace(proposal, elapsed_ms=elapsed_ms)

    def proposed(self, term: Term, now_ms: float) -> None:
        self._term, self._dated_ms = term, int(now_ms)

    def begin_term(self, term: Term) -> None:
        """A new leader does not have the time of the last proposal of its predecessor."""
        if self._term != term:
            self._term = None
