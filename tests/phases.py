"""The phases of `make test` and `make test-all`, and the report over all tests that ran.

    python -m tests.phases prepare    writes the archive of Spark's classes
    python -m tests.phases test       every phase without the tests marked `long`
    python -m tests.phases test-all [PHASE …]   with the tests marked `long` only: nothing runs twice
    python -m tests.phases test-extended   those marked `extended`, which are in neither
    python -m tests.phases report COMMAND [PHASE …]  its slowest tests, each skipped test with its reason, and the sum

Each phase is one pytest run. Its results are kept in `.test-results/` until the same phase of the command runs again:
JUnit XML, and beside it the commit that they belong to. A phase that takes longer than `PHASE_WITHIN_S`, or that still
runs at `NATSLOG_TESTS_UNTIL` (seconds since 1970, set by `.ci/run`), is stopped. That, and an end without results,
counts as one failed test.

Where up to `MOST_REPEATED` tests of a phase failed, they run once more, with nothing beside them: what waits for real
processes can fail on a machine that is busy. The report names those that passed only then; one that fails twice failed.

Hypothesis gives each test the same examples every time here, so that a run can be repeated. Plain pytest, `make
jetstream` and `make fuzz` draw new ones.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from tests.spark_start import quick_sparks

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / ".test-results"
SELECTIONS = {
    "test": "not long and not extended",
    "test-all": "long and not extended",
    "test-extended": "extended",
}
PHASE_WITHIN_S = 45 * 60.0
SLOWEST = 25
MOST_REPEATED = 5
_STOP_WITHIN_S = 60.0
_PASSED, _NO_TESTS_RAN = 0, 5
_HAVE_FAILURES = 1
_STOPPED = 2
_REPEATED = ".repeated"
_PROBLEM = ".problem.xml"
_FAILED_BEFORE = "failed-before"  # pytest's own record of what failed, one phase at a time


@dataclass(frozen=True, slots=True)
class Phase:
    """Folders of tests that run together, and how; those that are marked `alone`, or those that are not."""

    name: str
    title: str
    folders: tuple[str, ...]
    distribution: tuple[str, ...] = ()
    marked: str = "not alone"
    commands: tuple[str, ...] = tuple(SELECTIONS)


_LONG_ONES = ("test-all", "test-extended")
PHASES = (
    Phase(
        "pure",
        "code without other processes, on three processes",
        ("unit", "golden", "fuzz"),
        ("-n3", "--dist=worksteal"),
    ),
    Phase("simulation", "the simulation, on two processes", ("sim",), ("-n2", "--dist=worksteal")),
    Phase(
        "processes",
        "real brokers, NATS and Spark: a file at a time on five processes, the longest first",
        ("spark", "jetstream", "integration", "console"),
        ("-n5", "--dist=loadfile", "--no-loadscope-reorder"),
    ),
    Phase(
        "columnar",
        "the columnar reader for Spark, in processes whose JVM has its jar: a file at a time on three of them",
        ("columnar",),
        ("-n3", "--dist=loadfile", "--no-loadscope-reorder"),
        commands=_LONG_ONES,
    ),
    Phase(
        "faults",
        "processes that are killed, cut off, or without a disk: a file at a time on three processes, the longest first",
        ("soak", "chaos", "faults"),
        ("-n3", "--dist=loadfile", "--no-loadscope-reorder"),
        commands=_LONG_ONES,
    ),
    Phase(
        "faults-and-columnar",
        "one test of each kind: real faults, and the columnar reader for Spark; a file at a time on five processes",
        ("columnar", "soak", "chaos", "faults"),
        ("-n5", "--dist=loadfile", "--no-loadscope-reorder"),
        commands=("test",),
    ),
    Phase("rates", "those that compare rates, one after the other", ("faults", "integration"), (), "alone", _LONG_ONES),
)


def main(arguments: list[str]) -> int:
    interrupt_on_sigterm()
    try:
        return _run_command(arguments)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _run_command(arguments: list[str]) -> int:
    match arguments:
        case [("test" | "test-all" | "test-extended") as command, *names]:
            return run_all(command, names)
        case ["prepare"]:
            prepare()
            return 0
        case ["report", ("test" | "test-all" | "test-extended" | "affected") as command, *names]:
            return report(command, names)
        case _:
            print(__doc__, file=sys.stderr)
            return 2


def run_all(command: str, names: Sequence[str] = ()) -> int:
    """Runs every phase, or those that are named, also after one that failed; 1 where any of them did."""
    phases = [one for one in PHASES if command in one.commands and (not names or one.name in names)]
    if unknown := set(names) - {one.name for one in phases}:
        known = ", ".join(one.name for one in PHASES if command in one.commands)
        print(f"{command} has no phase {', '.join(sorted(unknown))}: there are {known}", file=sys.stderr)
        return 2
    environment = prepare()
    codes = [run_phase(command, phase, environment) for phase in phases]
    return int(any(code not in (_PASSED, _NO_TESTS_RAN) for code in codes))


def prepare() -> dict[str, str]:
    """What all phases need first, made once in a checkout. Returns variables for pytest."""
    RESULTS.mkdir(exist_ok=True)
    environment = quick_sparks(ROOT / ".test-cache")
    # Hundreds of processes start: none of them has to compile what another one has compiled.
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | environment


def run_phase(command: str, phase: Phase, environment: Mapping[str, str] | None = None) -> int:
    """Exit code of pytest, of the second run where there was one.

    Args:
        environment: of pytest; None: the one of this process.
    """
    for former in RESULTS.glob(f"{command}.{phase.name}.*"):
        former.unlink()
    name = f"{command}.{phase.name}"
    if _within_s() <= 0:
        note_problem(name, "it was not started, because the time was over")
        return _STOPPED
    print(f"\n== {command}, {phase.name}: {phase.title} ({', '.join(phase.folders)})", flush=True)
    shutil.rmtree(RESULTS / _FAILED_BEFORE, ignore_errors=True)
    code = _run(command, phase, name, phase.distribution, environment)
    if code == _HAVE_FAILURES:
        failed = sum(case.outcome == "failed" for case in _cases_in(RESULTS / f"{name}.xml"))
        if failed <= MOST_REPEATED:
            print(f"\n== {command}, {phase.name}: {failed} that failed, once more", flush=True)
            code = _run(command, phase, name + _REPEATED, ("--lf", "--lfnf=none"), environment)
    return code


def present_commit() -> str:
    """The checked-out one; whether files differ from it."""
    commit, changes = (
        subprocess.run(["git", *asked], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        for asked in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain"])
    )
    return (commit or "no commit") + (" with uncommitted changes" if changes else "")


def _run(command: str, phase: Phase, name: str, options: Sequence[str], environment: Mapping[str, str] | None) -> int:
    results = RESULTS / f"{name}.xml"
    folders = [f"tests/{folder}" for folder in phase.folders]
    chosen = ["-m", f"{SELECTIONS[command]} and {phase.marked}", "-o", f"cache_dir={RESULTS / _FAILED_BEFORE}"]
    started_s = time.monotonic()
    pytest = [sys.executable, "-m", "pytest", "--hypothesis-profile=ci", *folders, *chosen, *options]
    pytest.append(f"--junitxml={results}")
    problem, within_s, commit = "", _within_s(), present_commit()
    note_problem(name, "it did not end")
    (RESULTS / f"{name}.commit").write_text(commit)
    code, is_stopped = run_until(pytest, within_s, environment)
    if is_stopped:
        problem = f"it was stopped after {within_s:.0f} s"
    if code not in (_PASSED, _HAVE_FAILURES, _NO_TESTS_RAN) or not results.exists():
        note_problem(name, problem or f"pytest ended with exit code {code}")
    elif code == _NO_TESTS_RAN and command == "test":
        note_problem(name, "no test ran")
        code = _STOPPED
    else:
        remove_problem(name)
    after = present_commit()
    (RESULTS / f"{name}.commit").write_text(commit if after == commit else f"{commit}, at its end {after}")
    print(f"== {name}: {time.monotonic() - started_s:.0f} s", flush=True)
    return code


def run_until(pytest: Sequence[str | Path], within_s: float, environment: Mapping[str, str] | None) -> tuple[int, bool]:
    """Its exit code, and whether it was stopped because its time was over."""
    process = start_pytest(pytest, environment)
    try:
        return process.wait(within_s), False
    except subprocess.TimeoutExpired:
        return stop(process), True
    except BaseException:
        stop(process)
        raise


def start_pytest(pytest: Sequence[str | Path], environment: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    """In a session of its own, so that ^C reaches it only by `stop`, and once."""
    return subprocess.Popen(
        pytest, cwd=ROOT, env=environment, preexec_fn=_take_interrupts, start_new_session=True, stdin=subprocess.DEVNULL
    )


def _within_s() -> float:
    until = os.environ.get("NATSLOG_TESTS_UNTIL")
    return PHASE_WITHIN_S if until is None else max(0.0, min(PHASE_WITHIN_S, float(until) - time.time()))


def _take_interrupts() -> None:
    """A shell starts what runs in its background with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop(process: subprocess.Popen[bytes]) -> int:
    """As ^C does, so that fixtures end their processes; killed where that is not enough, or after a second ^C."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        _kill(process)
    except BaseException:
        _kill(process)
        raise
    return _STOPPED


def _kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def interrupt_on_sigterm() -> None:
    """SIGTERM and SIGHUP end this process as ^C does, with what it has started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def note_problem(name: str, problem: str) -> None:
    suite = ElementTree.Element("testsuite")
    case = ElementTree.SubElement(suite, "testcase", classname="tests.phases", name=name, time="0")
    ElementTree.SubElement(case, "failure", message=problem)
    ElementTree.ElementTree(suite).write(RESULTS / f"{name}{_PROBLEM}")


def remove_problem(name: str) -> None:
    (RESULTS / f"{name}{_PROBLEM}").unlink()


# ---- the report ----


Outcome = Literal["passed", "repeated", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Case:
    """One test that ran; `took_s` with what its fixtures took. `repeated`: it failed, and passed the second time."""

    name: str
    took_s: float
    outcome: Outcome
    reason: str = ""


def report(command: str, phases: Sequence[str] = (), results: Path = RESULTS) -> int:
    """Prints what `.ci/run` ends with, and what a closing note states; 1 where a test failed or none ran."""
    known = [one for one in PHASES if command in one.commands and (not phases or one.name in phases)]
    names = [f"{command}.{phase.name}" for phase in known] or sorted(
        path.stem for path in results.glob(f"{command}.*.commit")
    )
    cases = [case for name in names for case in cases_of(results, name)]
    print(f"\n== {command}: each part with its commit")
    for name in names:
        ran = results / f"{name}.commit"
        text = f"{len(cases_of(results, name))} tests, commit {ran.read_text()}" if ran.exists() else "did not run"
        print(f"{name}: {text}{', did not end' if (results / f'{name}{_PROBLEM}').exists() else ''}")
    missing = [name for name in names if not (results / f"{name}.commit").exists()]
    commits = {(results / f"{name}.commit").read_text() for name in names if name not in missing}
    print(f"\n== the {SLOWEST} slowest tests of {len(cases)}, with their fixtures")
    for case in sorted(cases, key=lambda one: one.took_s, reverse=True)[:SLOWEST]:
        print(f"{case.took_s:8.1f} s  {case.name}")
    print(f"\n== the behaviour of the Spark source: {behaviour(cases)}")
    titles = {"skipped": "skipped", "repeated": "failed, and passed when repeated", "failed": "failed"}
    for outcome, title in titles.items():
        chosen = [case for case in cases if case.outcome == outcome]
        print(f"\n== {title}: {len(chosen) or 'none'}")
        for case in chosen:
            print(f"{case.name}: {case.reason}")
    failed, skipped = (sum(case.outcome == outcome for case in cases) for outcome in ("failed", "skipped"))
    whole = f"{len(names)} parts, all of commit {commits.pop()}" if len(commits) == 1 else f"of {len(commits)} commits"
    print(
        f"\n== {len(cases)} tests in all; {f'{len(missing)} of {len(names)} parts did not run' if missing else whole}"
    )
    print(f"{len(cases) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0 or bool(missing) or not cases)


def behaviour(cases: Sequence[Case]) -> str:
    """How many tests of `tests/spark` ran with each reader: those of modules that `tests/columnar` has too."""
    modules = [case.name.split("::")[0].split(".") for case in cases]
    ran = [(parts[-2], parts[-1]) for parts in modules if len(parts) > 2]
    both = {name for folder, name in ran if folder == "spark"} & {name for folder, name in ran if folder == "columnar"}
    counts = {here: sum(folder == here and name in both for folder, name in ran) for here in ("spark", "columnar")}
    return f"{counts['spark']} tests with the Python source, {counts['columnar']} with the columnar reader"


def cases_of(results: Path, name: str) -> list[Case]:
    """Of this part of a command, with its problem, if it did not end."""
    second = {case.name for case in _cases_in(results / f"{name}{_REPEATED}.xml") if case.outcome == "passed"}
    first = _cases_in(results / f"{name}.xml")
    found = [
        replace(one, outcome="repeated") if one.outcome == "failed" and one.name in second else one for one in first
    ]
    problems = (results / f"{part}{_PROBLEM}" for part in (name, name + _REPEATED))
    return found + [case for path in problems for case in _cases_in(path)]


def _cases_in(path: Path) -> list[Case]:
    found = ElementTree.parse(path).iter("testcase") if path.exists() else ()
    return [_case(one) for one in found if one.get("name")]  # an interrupted pytest writes one without a name


def _case(one: ElementTree.Element) -> Case:
    name = f"{one.get('classname')}::{one.get('name')}"
    outcome: Outcome = "passed"
    reason = ""
    for child in one:
        if child.tag in ("failure", "error", "skipped"):
            outcome = "skipped" if child.tag == "skipped" and outcome == "passed" else "failed"
            reason = (child.get("message") or "").partition("\n")[0]
    return Case(name, float(one.get("time") or 0), outcome, reason)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
