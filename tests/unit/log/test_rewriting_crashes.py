"""A crash at any moment of rewriting or of erasing leaves the old files or the new ones, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyroaring import BitMap64

from natslog.log.rules import Rule
from natslog.model import Epoch
from tests.unit.log.crash_points import Images, images_of
from tests.unit.log.removal_model import Message, Replica, Settings, Stream, offsets_in_files

NO_WINDOW_US = 2**60
SETTINGS = Settings((Rule(Epoch(0), None, compacts=True),))
SEGMENTS = 2
DELETED, ERASED = {1, 8}, {2, 5, 9, 12}
"""Of each segment one, and the messages on `b`."""


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    """Two sealed segments, each with messages that are superseded, deleted and to be erased, and an open one."""
    made = Stream(tmp_path / "replicas", SETTINGS)
    part = [
        Message("a", "k"),
        Message("a"),
        Message("b"),
        Message("a", "k"),
        Message("c", "l"),
        Message("b", "m"),
        Message("a"),
    ]
    for _ in range(SEGMENTS):
        made.append(part)
        made.seal_all()
    made.append([Message("c")])
    for offset in sorted(DELETED):
        made.delete(offset)
    made.settle()
    made.record_hidden(1)
    made.settle()
    return made


def images_while(stream: Stream, target: Path, work: Callable[[Replica], object], *, tears: bool) -> Images:
    """Of the leader, of all of the work."""
    replica = stream.leader
    images = Images(replica.folder, target, tears=tears)
    with images_of(images):
        while work(replica):
            pass
    return images


def reopened(stream: Stream, folder: Path) -> Replica:
    """As after a crash; it has received the records and the high watermark again."""
    leader = stream.leader
    replica = Replica(folder, stream.settings)
    assert replica.log.failure is None
    assert not list(folder.glob("*.tmp"))
    replica.commit(leader.log.high_watermark, leader.companion.high_watermark)
    return replica


def rewrite(replica: Replica) -> bool:
    return replica.log.upkeep.rewrite_next(NO_WINDOW_US)


def file_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.arrow")}


@pytest.mark.parametrize("tears", [False, True], ids=["synced", "torn"])
def test_a_crash_while_files_are_rewritten(stream: Stream, tmp_path: Path, tears: bool) -> None:
    before, expected = file_bytes(stream.leader.folder), stream.leader.visible(1 << 20)
    images = images_while(stream, tmp_path / "images", rewrite, tears=tears)
    after = file_bytes(stream.leader.folder)
    assert all(after[name] != before[name] for name in before)
    _check_moments(images, ["fsync 00000000000000000000.tmp", "replace 00000000000000000000.tmp", "fsync a"])
    for image in images.made:
        found = file_bytes(image.folder)
        assert all(found[name] in (before[name], after[name]) for name in before), image.moment
        replica = reopened(stream, image.folder)
        assert replica.visible(1 << 20) == expected, image.moment
        while rewrite(replica):
            pass
        assert replica.visible(1) == expected, image.moment
        assert file_bytes(image.folder) == after, image.moment
        replica.close()
    stream.close()


@pytest.mark.long
@pytest.mark.parametrize("tears", [False, True], ids=["synced", "torn"])
def test_a_crash_while_messages_are_erased(stream: Stream, tmp_path: Path, tears: bool) -> None:
    stream.erase("subject", "b")
    stream.settle()
    before, expected = file_bytes(stream.leader.folder), stream.leader.visible(1 << 20)
    images = images_while(
        stream, tmp_path / "images", lambda one: one.log.upkeep.erase_next(stream.now_us), tears=tears
    )
    after = file_bytes(stream.leader.folder)
    _check_moments(
        images,
        ["fsync 00000000000000000000.tmp", "fsync erasures.new", "replace erasures.new", "replace newest.new"],
    )
    for image in images.made:
        found = file_bytes(image.folder)
        assert all(found[name] in (before[name], after[name]) for name in before), image.moment
        replica = reopened(stream, image.folder)
        assert replica.visible(1 << 20) == expected, image.moment
        while replica.log.upkeep.erase_next(stream.now_us):
            pass
        _check_erased(replica, image.moment)
        assert replica.visible(1) == expected, image.moment
        replica.close()
        again = reopened(stream, image.folder)
        _check_erased(again, image.moment)
        assert again.visible(1) == expected, image.moment
        again.close()
    stream.close()


def _check_moments(images: Images, expected: list[str]) -> None:
    """Of each file, and one image for each call at least."""
    moments = [image.moment.partition(": ")[2] for image in images.made]
    for one in expected:
        assert moments.count(one) >= 1, (one, moments)
    assert len([one for one in moments if one.startswith("replace") and one.endswith(".tmp")]) == SEGMENTS, moments


def _check_erased(replica: Replica, moment: str) -> None:
    assert not replica.log.erasures.is_pending, moment
    assert offsets_in_files(replica.folder, ERASED) == set(), moment
    for name in replica.log.erasures.all_rows().ids:
        known, receipt = replica.log.erasures.receipt(name) or pytest.fail("it is known")
        assert known.offsets == BitMap64(ERASED)
        assert sorted(file.name for file in receipt.files) == sorted(file_bytes(replica.folder)), moment
