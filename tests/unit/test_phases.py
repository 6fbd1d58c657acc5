"""`make test` and `make test-all` run every test once, and the report counts and names what they did."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests import phases
from tests.conftest import scope_of

RESULTS = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_good[1]" time="1.5" />
<testcase classname="tests.unit.test_a" name="test_bad" time="2.25">
<failure message="assert 1 == 2&#10;and more">text</failure></testcase>
<testcase classname="tests.unit.test_a" name="test_broken_fixture" time="0.0"><error message="oh" /></testcase>
<testcase classname="tests.faults.test_b" name="test_cut" time="0.5"><skipped message="nft not found">text</skipped>
</testcase></testsuite></testsuites>"""


def test_every_test_belongs_to_one_phase() -> None:
    tests = phases.ROOT / "tests"
    files = [path for path in tests.rglob("test_*.py") if path != Path(__file__)]
    have = {path.relative_to(tests).parts[0] for path in files} | {"unit"}
    have_alone = {path.relative_to(tests).parts[0] for path in files if "pytest.mark.alone" in path.read_text()}
    for command, marked, expected in [
        ("test", "not alone", have),
        ("test-all", "not alone", have),
        ("test-all", "alone", have_alone),
        ("test-extended", "not alone", have),
    ]:
        chosen = [one for one in phases.PHASES if one.marked == marked and command in one.commands]
        assert sorted(folder for one in chosen for folder in one.folders) == sorted(expected)


@pytest.fixture
def pure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results, where there is one phase."""
    monkeypatch.setattr(phases, "PHASES", [one for one in phases.PHASES if one.name == "pure"])
    (tmp_path / "test.pure.commit").write_text("abc")
    return tmp_path


def test_report_counts_every_outcome_and_ends_with_the_sum(
    pure: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test.pure.xml").write_text(RESULTS)
    assert phases.report("test", results=tmp_path) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["== 4 tests in all; 1 parts, all of commit abc", "1 passed, 2 failed, 1 skipped"]
    slowest = said.index("== the 25 slowest tests of 4, with their fixtures")
    assert said[slowest + 1 : slowest + 3] == [
        "     2.2 s  tests.unit.test_a::test_bad",
        "     1.5 s  tests.unit.test_a::test_good[1]",
    ]
    assert "tests.faults.test_b::test_cut: nft not found" in said
    assert "tests.unit.test_a::test_bad: assert 1 == 2" in said


def test_report_states_the_commit_of_each_part_and_fails_where_one_did_not_run_or_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = '<testsuites><testsuite><testcase classname="a" name="b" time="1"/></testsuite></testsuites>'
    names = [f"test.{phase.name}" for phase in phases.PHASES if "test" in phase.commands]
    for name in names:
        (tmp_path / f"{name}.xml").write_text(good)
        (tmp_path / f"{name}.commit").write_text("abc with uncommitted changes")
    (tmp_path / "test.of-long-ago.xml").write_text(RESULTS)
    assert phases.report("test", results=tmp_path) == 0
    assert f"{names[0]}: 1 tests, commit abc with uncommitted changes" in capsys.readouterr().out
    (tmp_path / f"{names[0]}.commit").unlink()
    assert phases.report("test", results=tmp_path) == 1
    assert f"{names[0]}: did not run" in capsys.readouterr().out
    (tmp_path / f"{names[0]}.commit").write_text("abc")
    (tmp_path / f"{names[0]}.problem.xml").write_text(
        '<testsuite><testcase classname="tests.phases" name="x" time="0"><failure message="it did not end" />'
        "</testcase></testsuite>"
    )
    assert phases.report("test", results=tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{len(names)} passed, 1 failed, 0 skipped"


def test_report_of_nothing_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert phases.report("test", results=tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 0 failed, 0 skipped"


def test_phase_that_ends_without_results_counts_as_a_failed_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(phases, "RESULTS", tmp_path)
    broken = phases.Phase("broken", "a folder that is not there", ("nowhere",))
    monkeypatch.setattr(phases, "PHASES", (broken,))
    assert phases.run_phase("test", broken) != 0
    assert phases.report("test", results=tmp_path) == 1
    assert "tests.phases::test.broken: pytest ended with exit code 4" in capsys.readouterr().out


def phase_of(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> phases.Phase:
    """A phase that has this one module."""
    own = folder / "tests" / "own"
    own.mkdir(parents=True)
    (own / "test_own.py").write_text(code)
    monkeypatch.setattr(phases, "ROOT", folder)
    monkeypatch.setattr(phases, "RESULTS", folder)
    found = phases.Phase("own", "tests of a test", ("own",))
    monkeypatch.setattr(phases, "PHASES", (found,))
    return found


def test_phase_that_begins_after_the_end_of_the_time_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    phase = phase_of("def test_good(): pass\n", tmp_path, monkeypatch)
    monkeypatch.setenv("NATSLOG_TESTS_UNTIL", str(time.time() - 1.0))
    assert phases.run_phase("test", phase) != 0
    assert phases.report("test", results=tmp_path) == 1
    assert "it was not started, because the time was over" in capsys.readouterr().out


def test_phase_of_make_test_without_tests_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    phase = phase_of("import pytest\n@pytest.mark.long\ndef test_good(): pass\n", tmp_path, monkeypatch)
    assert phases.run_phase("test", phase) != 0
    assert phases.report("test", results=tmp_path) == 1
    assert "no test ran" in capsys.readouterr().out


def test_what_failed_runs_once_more_and_the_report_names_what_passed_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    phase = phase_of(
        f"""
from pathlib import Path
def test_good(): pass
def test_busy():
    runs = Path({str(tmp_path)!r}, "runs")
    with runs.open("a") as file: file.write("x")
    assert runs.read_text() == "xx"
def test_bad(): assert 1 == 2
""",
        tmp_path,
        monkeypatch,
    )
    assert phases.run_phase("test", phase) == 1
    assert phases.report("test", results=tmp_path) == 1
    said = capsys.readouterr().out.splitlines()
    at = said.index("== failed, and passed when repeated: 1")
    assert said[at + 1].startswith("tests.own.test_own::test_busy: AssertionError: ")
    assert said[said.index("== failed: 1") + 1] == "tests.own.test_own::test_bad: assert 1 == 2"
    assert said[-1] == "2 passed, 1 failed, 0 skipped"


@pytest.mark.long
def test_nothing_is_repeated_where_much_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import pytest\n@pytest.mark.parametrize('at', range(6))\ndef test_bad(at): assert False\n"
    assert phases.run_phase("test", phase_of(code, tmp_path, monkeypatch)) == 1
    assert phases.report("test", results=tmp_path) == 1
    said = capsys.readouterr().out
    assert "once more" not in said
    assert said.endswith("0 passed, 6 failed, 0 skipped\n")


@pytest.mark.long
def test_phase_that_takes_too_long_is_stopped_and_counts_as_a_failed_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = phase_of("import threading\ndef test_slow():\n    threading.Event().wait(60)\n", tmp_path, monkeypatch)
    monkeypatch.setenv("NATSLOG_TESTS_UNTIL", str(time.time() + 10.0))
    phases.run_phase("test", slow)
    assert phases.report("test", results=tmp_path) == 1
    assert re.search(r"it was stopped after \d+ s", capsys.readouterr().out)


def test_files_that_share_a_spark_stay_in_two_processes_and_others_by_themselves() -> None:
    files = ["integration/test_cli.py", "spark/test_jobs.py", "spark/test_sink.py", "spark/test_stream.py"]
    scopes = [scope_of(f"tests/{file}::test_a[b::c]", 2, are_columnar_together=False) for file in files]
    assert scopes[:2] == ["tests/integration/test_cli.py", "tests/spark/test_jobs.py"]
    names = [f"tests/spark/test_{name}.py::test_a" for name in "abcdefgh"]
    shared = {scope_of(name, 2, are_columnar_together=False) for name in names}
    assert {*scopes[2:]} <= shared == {"spark 0", "spark 1"}


def test_in_make_test_the_columnar_reader_has_one_process_and_the_python_source_another() -> None:
    files = ["columnar/test_stream.py", "columnar/test_batch.py", "spark/test_sink.py", "spark/test_batch.py"]
    found = [scope_of(f"tests/{file}::test_a", 1, are_columnar_together=True) for file in files]
    assert found == ["columnar", "columnar", "spark 0", "spark 0"]


def test_report_counts_the_tests_that_both_readers_of_spark_pass() -> None:
    names = [
        "spark.test_lag::a",
        "spark.test_lag::b",
        "spark.test_sink::c",
        "columnar.test_lag::a",
        "columnar.test_oracle::d",
    ]
    cases = [phases.Case(f"tests.{name}", 1.0, "passed") for name in names] + [phases.Case("::broken", 0.0, "failed")]
    assert phases.behaviour(cases) == "2 tests with the Python source, 1 with the columnar reader"
