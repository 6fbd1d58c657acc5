"""Which long tests a change affects, in which order, and what is left out."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests import affected, phases
from tests.phases import ROOT


def test_every_place_of_the_table_exists() -> None:
    missing = [path for path, _ in affected.TABLE if not (ROOT / path).exists()]
    missing += [one for _, tests in affected.TABLE for one in tests if not (ROOT / "tests" / one).exists()]
    assert not missing


def test_every_module_of_the_product_is_in_the_table() -> None:
    modules = [path for top in ("broker", "connector") for path in (ROOT / top).rglob("*.py")]
    assert len(modules) > 300
    assert affected.chosen(str(path.relative_to(ROOT)) for path in modules)[1] == []


def test_changed_tests_come_first_and_the_most_telling_of_each_subject_next() -> None:
    changed = ["broker/natslog/cluster/replica.py", "tests/unit/test_pages.py", "connector/jvm/src/natslog/Body.java"]
    found, unknown = affected.chosen([*changed, "LICENSE", "tests/chaos/damage.py"])
    assert found[:4] == ["chaos/", "unit/test_pages.py", "sim/", "columnar/"]
    assert "faults/test_kill.py" in found
    assert len(found) == len(set(found))
    assert unknown == ["LICENSE"]


def test_files_are_in_the_order_in_which_they_are_wanted_once_each() -> None:
    collected = ["tests/sim/test_b.py::test_x[1]", "tests/faults/test_a.py::test_y", "tests/sim/test_b.py::test_z", ""]
    assert affected.in_order(["faults/", "sim/test_b.py", "sim/"], collected) == [
        "tests/faults/test_a.py",
        "tests/sim/test_b.py",
    ]


def test_every_place_of_the_table_has_long_tests() -> None:
    for place in {one for _, tests in affected.TABLE for one in tests}:
        path = ROOT / "tests" / place
        files = [path] if path.is_file() else list(path.rglob("*.py"))
        is_long = place.startswith("columnar/")  # by its conftest
        assert is_long or any("mark.long" in file.read_text() for file in files), place


def test_unknown_commit_is_an_error() -> None:
    with pytest.raises(SystemExit, match="SINCE=docs is not a commit"):
        affected.changed_since("docs")


def test_what_does_not_begin_in_time_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affected, "RESULTS", tmp_path)
    runs = affected.Runs(["tests/a.py", "tests/b.py"], {}, time.monotonic())
    runs.run()
    assert sorted(runs.left_out) == ["tests/a.py", "tests/b.py"]
    assert runs.failed == []


def test_long_tests_of_a_folder_are_found_by_pytest() -> None:
    assert "tests/unit/log/test_scrub.py" in affected.long_tests_of(
        ["unit/log/test_scrub.py", "unit/log/test_cutting.py"]
    )
    assert affected.long_tests_of(["nowhere/"]) == []


@pytest.mark.long
def test_failed_and_stopped_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affected, "RESULTS", tmp_path)
    monkeypatch.setattr(phases, "RESULTS", tmp_path)
    head = "import threading, pytest\npytestmark = pytest.mark.long\n"
    bad, slow = tmp_path / "test_bad.py", tmp_path / "test_slow.py"
    bad.write_text(head + "def test_bad():\n    assert False\n")
    slow.write_text(head + "def test_slow():\n    threading.Event().wait(100)\n")
    runs = affected.Runs([str(bad), str(slow)], os.environ, time.monotonic() + 30)
    runs.run()
    assert (runs.failed, runs.left_out) == ([str(bad)], [str(slow)])
