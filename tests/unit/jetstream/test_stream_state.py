"""The state of a stream whose messages are removed while it is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from natslog.jetstream.stream_state import MAX_SUBJECT_DETAILS, NO_TIME, state_of, subjects_of, time_of
from tests.conftest import open_log, rows


@pytest.mark.parametrize(
    ("removed_below", "first_ts"), [(0, time_of(1)), (1, time_of(2)), (2, time_of(3)), (3, NO_TIME)], ids=str
)
def test_messages_that_are_removed_meanwhile_do_not_fail_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed_below: int, first_ts: str
) -> None:
    """As a work queue does with each batch of acks: then the time is that of the message that is the first now."""
    log = open_log(tmp_path / "log")
    for at in range(3):
        log.append(rows([b"x"]), at + 1)
    size_of = log.message_bytes.total

    def removing(start: int, end: int) -> int:
        log.limits.move_to(removed_below)
        return size_of(start, end)

    monkeypatch.setattr(log.message_bytes, "total", removing)
    state = state_of(log)
    assert (state.messages, state.first_seq, state.last_seq) == (3, 1, 3)
    assert (state.first_ts, state.last_ts) == (first_ts, time_of(3))
    log.close()


def test_every_page_of_subjects_has_the_size_that_it_states(tmp_path: Path) -> None:
    """nats.js requests page `n` at `n` times the limit."""
    log = open_log(tmp_path / "log")
    subjects = sorted(f"a.{'x' * (at % 7)}{at}" for at in range(200))
    for at, subject in enumerate(subjects):
        log.append(rows([b"v"], subject), at + 1)
    whole = subjects_of(log, ">", 0, 10**9)
    assert (whole.limit, whole.total, list(whole.counts or ())) == (MAX_SUBJECT_DETAILS, 200, subjects)
    pages = [subjects_of(log, "a.*", 0, 2000)]
    limit = pages[0].limit
    assert 10 < limit < 200
    pages += [subjects_of(log, "a.*", number * limit, 2000) for number in range(1, 200 // limit + 2)]
    assert {page.limit for page in pages} == {limit}
    assert [subject for page in pages for subject in page.counts or ()] == subjects
    assert [len(page.counts or ()) for page in pages[:-2]] == [limit] * (len(pages) - 2)
    log.close()
