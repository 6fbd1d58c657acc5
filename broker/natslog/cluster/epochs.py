"""Which leader epoch wrote which part of a log. Truncation uses this history.

Invariants. Epochs and start offsets increase together. An epoch's records are `[its start, the next one's start)`; two
replicas that hold a record of one epoch at one offset hold the same log up to there, so a follower whose log differs
truncates it to the last (epoch, offset) that both hold.

Source: Kafka's LeaderEpochFileCache; KIP-101, KIP-279.
"""

from __future__ import annotations

from collections.abc import Iterable

from natslog.model import Epoch

NO_EPOCH = Epoch(0)
"""Of an empty log; every leader's epoch is higher."""


class EpochHistory:
    """Args: `(epoch, start offset)` pairs, oldest first."""

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self.entries: list[tuple[Epoch, int]] = [(Epoch(epoch), start) for epoch, start in entries]

    def copy(self) -> EpochHistory:
        return EpochHistory(self.entries)

    @property
    def latest(self) -> Epoch:
        return self.entries[-1][0] if self.entries else NO_EPOCH

    def last_epoch_before(self, end_offset: int) -> Epoch:
        """The epoch of the record just below `end_offset`."""
        return next((epoch for epoch, start in reversed(self.entries) if start < end_offset), NO_EPOCH)

    def end_of(self, epoch: Epoch, log_end_offset: int) -> tuple[Epoch, int]:
        """The greatest epoch here that is not above `epoch`, and where its records end; (`NO_EPOCH`, the first known
        start) where all known ones are above it.
        """
        end = log_end_offset
        for known, start in reversed(self.entries):
            if known <= epoch:
                return known, end
            end = min(end, start)
        return NO_EPOCH, end

    def begin(self, epoch: Epoch, start_offset: int) -> bool:
        """Records from `start_offset` on are of `epoch`. Returns whether that is new.

        An epoch may begin and have no records; records that are copied from the next leader may then be of an older
        epoch.
        """
        if epoch == self.latest:
            return False
        while self.entries and self.entries[-1][1] >= start_offset:
            self.entries.pop()  # an epoch without records
        assert epoch >= self.latest, f"epoch {epoch} comes after {self.latest}"
        if epoch > self.latest:
            self.entries.append((epoch, start_offset))
        return True

    def cut_to(self, end_offset: int) -> bool:
        """Removes epochs that the log no longer has. Returns whether anything was removed."""
        kept = [(epoch, start) for epoch, start in self.entries if start < end_offset]
        changed = len(kept) != len(self.entries)
        self.entries = kept
        return changed
