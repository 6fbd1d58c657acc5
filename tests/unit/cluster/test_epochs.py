"""Leader epochs of a log, against a model that keeps the epoch of every record."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from natslog.cluster.epochs import NO_EPOCH, EpochHistory
from natslog.model import Epoch


@dataclass
class Model:
    """A log as the list of its records' epochs."""

    records: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return len(self.records)

    def last_epoch_before(self, end_offset: int) -> int:
        kept = self.records[:end_offset]
        return kept[-1] if kept else NO_EPOCH

    def end_of(self, epoch: int) -> tuple[int, int]:
        """Of the greatest epoch not above `epoch` that has records."""
        found = max((one for one in self.records if one <= epoch), default=NO_EPOCH)
        end = sum(one <= epoch for one in self.records)
        return found, end


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("lead"), st.integers(0, 3)),
        st.tuples(st.just("copy"), st.integers(0, 3)),
        st.tuples(st.just("cut"), st.integers(0, 12)),
    ),
    max_size=25,
)


def step(model: Model, history: EpochHistory, deed: str, number: int, epoch: int) -> None:
    match deed:
        case "lead":  # a new epoch, perhaps without records
            history.begin(Epoch(epoch), model.end)
            model.records += [epoch] * number
        case "copy":  # of a leader whose records may be of an epoch older than the last one begun here
            copied = max(epoch - number, model.last_epoch_before(model.end), 1)
            history.begin(Epoch(copied), model.end)
            model.records.append(copied)
        case "cut":
            end = max(0, model.end - number)
            history.cut_to(end)
            del model.records[end:]


@given(STEPS)
def test_history_says_what_a_list_of_all_records_says(steps: list[tuple[str, int]]) -> None:
    model, history = Model(), EpochHistory()
    for at, (deed, number) in enumerate(steps):
        step(model, history, deed, number, epoch=5 + at)
        assert_rises(history)
        for end in range(1, model.end + 1):
            assert history.last_epoch_before(end) == model.last_epoch_before(end)
        for epoch in {*model.records}:
            assert history.end_of(Epoch(epoch), model.end) == model.end_of(epoch)
        if model.records:
            assert history.end_of(Epoch(1000), model.end)[1] == model.end
            below, end = history.end_of(Epoch(min(model.records) - 1), model.end)
            assert below < min(model.records)
            assert end == 0


def assert_rises(history: EpochHistory) -> None:
    for (epoch, start), (next_epoch, next_start) in zip(history.entries, history.entries[1:], strict=False):
        assert epoch < next_epoch, history.entries
        assert start < next_start, history.entries


@given(STEPS)
def test_history_from_its_own_entries_is_the_same(steps: list[tuple[str, int]]) -> None:
    model, history = Model(), EpochHistory()
    for at, (deed, number) in enumerate(steps):
        step(model, history, deed, number, epoch=5 + at)
    assert EpochHistory(history.entries).entries == history.entries


def test_epoch_begun_again_is_not_new() -> None:
    history = EpochHistory()
    assert history.begin(Epoch(3), 0)
    assert not history.begin(Epoch(3), 7)
    assert history.entries == [(3, 0)]


def test_epoch_without_records_gives_way_to_an_older_one_that_is_copied() -> None:
    """It led and wrote nothing; the next leader has more records of the epoch before."""
    history = EpochHistory([(2, 0), (3, 5)])
    assert history.begin(Epoch(2), 5)
    assert history.entries == [(2, 0)]


def test_cut_says_whether_anything_was_forgotten() -> None:
    history = EpochHistory([(1, 0), (2, 5), (3, 9)])
    assert not history.cut_to(10)
    assert history.cut_to(9)
    assert history.entries == [(1, 0), (2, 5)]
