"""The file `life`: which lives a folder lists, whatever ends the broker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from natslog.errors import CorruptLog
from natslog.log import checked_file
from natslog.log.checked_file import write_checked
from natslog.log.verify import check_file, files_of
from natslog.node.life import MAX_LIVES, Life

FOLDER = "3f00"


def start(path: Path, *, must_exist: bool = False) -> Life:
    return Life(path / "life", FOLDER, must_exist=must_exist)


def test_each_start_has_the_next_number_and_another_nonce(tmp_path: Path) -> None:
    first, second = start(tmp_path), start(tmp_path)
    assert (first.number, second.number) == (1, 2)
    assert first.nonce != second.nonce
    assert second.name == f"{FOLDER}.2.{second.nonce}"


def test_life_is_listed_before_it_is_proposed_and_a_copy_from_before_lacks_it(tmp_path: Path) -> None:
    first = start(tmp_path)
    first.note()
    copy = (tmp_path / "life").read_bytes()
    second = start(tmp_path)
    second.note()
    assert start(tmp_path).lives == (first.name, second.name)
    (tmp_path / "life").write_bytes(copy)
    restored = start(tmp_path)
    assert restored.number == second.number
    assert second.name not in restored.shown
    assert restored.shown == (first.name, restored.name)


def test_file_is_known_to_verify(tmp_path: Path) -> None:
    start(tmp_path).note()
    (path,) = files_of(tmp_path)
    assert check_file(path).problems == ()
    path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    assert check_file(path).problems != ()


def test_lives_that_were_registered_at_level_1_are_still_listed(tmp_path: Path) -> None:
    """As natslog 0.2.0 wrote the file before the upgrade was finalized."""
    content = {
        "number": 6,
        "has_ended": True,
        "directory": FOLDER,
        "nonce": "9c",
        "lives": [f"{FOLDER}.5", f"{FOLDER}.6"],
    }
    write_checked(tmp_path / "life", "life", 1, content)
    life = start(tmp_path)
    assert (life.number, life.after) == (7, f"{FOLDER}.6")
    life.note()
    assert life.shown == (f"{FOLDER}.5", f"{FOLDER}.6", life.name)


def test_starts_without_a_metadata_leader_are_not_listed(tmp_path: Path) -> None:
    first = start(tmp_path)
    first.note()
    for _ in range(300):
        last = start(tmp_path)
    assert last.number == 301
    assert last.lives == (first.name,)


def test_list_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    for _ in range(MAX_LIVES + 10):
        last = start(tmp_path)
        last.note()
    assert len(start(tmp_path).lives) == MAX_LIVES
    assert last.lives[-1] == last.name


def test_only_the_life_that_ended_in_order_right_before_vouches_for_the_logs(tmp_path: Path) -> None:
    first = start(tmp_path)
    first.note()
    first.end()
    second = start(tmp_path)
    assert second.after == first.name
    assert start(tmp_path).after == "", "the second one did not end in order"


def test_missing_file_of_a_used_folder_is_not_replaced_until_the_folder_proves_more(tmp_path: Path) -> None:
    life = start(tmp_path, must_exist=True)
    assert life.is_missing
    assert not (tmp_path / "life").exists()
    life.follow(7, f"{FOLDER}.7.abc")
    assert not life.is_missing
    assert (life.number, life.lives, life.after) == (8, (f"{FOLDER}.7.abc",), "")
    assert start(tmp_path, must_exist=True).number == 9


def test_file_of_another_folder_is_refused(tmp_path: Path) -> None:
    start(tmp_path)
    with pytest.raises(CorruptLog, match="another data folder"):
        Life(tmp_path / "life", "other", must_exist=False)


STEPS = {"write": (checked_file, "open"), "sync": (os, "fsync"), "rename": (os, "replace"), "folder": (os, "open")}
CHANGES: dict[str, Callable[[Life], None]] = {
    "note": lambda life: life.note(),
    "end": lambda life: life.end(),
    "follow": lambda life: life.follow(9, f"{FOLDER}.9.abc"),
}


@contextmanager
def broken(step: str) -> Iterator[None]:
    """The power fails at this step of the replacement of a file."""

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(5, "the power is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*STEPS[step], fail, raising=False)
        yield


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("change", CHANGES)
def test_crash_at_any_step_of_a_change_loses_no_listed_life_and_vouches_for_nothing(
    tmp_path: Path, change: str, step: str
) -> None:
    first = start(tmp_path)
    first.note()
    first.end()
    second = start(tmp_path)
    with broken(step), pytest.raises(OSError, match="power"):
        CHANGES[change](second)
    assert second.lives == (first.name,), "what is not known to be durable is not proposed"
    third = start(tmp_path)
    assert first.name in third.lives
    assert third.number > second.number
    assert third.after == "", "the second life was not proposed, and the first one did not end right before"


@pytest.mark.parametrize("step", STEPS)
def test_crash_at_any_step_of_a_start_loses_no_listed_life(tmp_path: Path, step: str) -> None:
    first = start(tmp_path)
    first.note()
    with broken(step), pytest.raises(OSError, match="power"):
        start(tmp_path)
    second = start(tmp_path)
    assert second.lives == (first.name,)
    assert second.number > first.number


def test_life_whose_note_failed_is_noted_again_before_it_is_proposed(tmp_path: Path) -> None:
    life = start(tmp_path)
    with broken("folder"), pytest.raises(OSError, match="power"):
        life.note()
    life.note()
    assert start(tmp_path).lives == (life.name,)
