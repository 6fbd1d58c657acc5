"""The phases of `make test` and `make test-all`, and the report over all tests that ran.

    python -m tests.phases test       every phase without the tests marked `long`
    python -m tests.phases test-all   every phase with the tests marked `long` only: nothing runs twice
    python -m tests.phases report     the slowest tests, each skipped test with its reason, and the sum

Each phase is one pytest run. Its results are kept in `.test-results/` as JUnit XML until the same command runs again. A
phase that takes longer than `PHASE_WITHIN_S`, or that still runs at `NATSLOG_TESTS_UNTIL` (seconds since 1970,
set by `.ci/run`), is stopped. That, and an end without results, counts as one failed test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / ".test-results"
SELECTIONS = {"test": "not long", "test-all": "long"}
PHASE_WITHIN_S = 35 * 60.0
SLOWEST = 25
_STOP_WITHIN_S = 60.0
_PASSED, _NO_TESTS_RAN = 0, 5
_HAVE_FAILURES = 1


@dataclass(frozen=True, slots=True)
class Phase:
    """Folders of tests that run together, and how; those that are marked `alone`, or those that are not."""

    name: str
    title: str
    folders: tuple[str, ...]
    distribution: tuple[str, ...] = ()
    marked: str = "not alone"


PHASES = (
    Phase(
        "pure",
        "code without other processes, on two processes",
        ("unit", "golden", "fuzz"),
        ("-n2", "--dist=worksteal"),
    ),
    Phase("simulation", "the simulation, on two processes", ("sim",), ("-n2", "--dist=worksteal")),
    Phase(
        "processes",
        "real brokers, NATS and Spark: a file at a time on three processes, the longest first",
        ("spark", "jetstream", "integration"),
        ("-n3", "--dist=loadfile", "--no-loadscope-reorder"),
    ),
    Phase(
        "faults",
        "processes that are killed, cut off, or without a disk: a file at a time on two processes, the longest first",
        ("soak", "chaos", "faults"),
        ("-n2", "--dist=loadfile", "--no-loadscope-reorder"),
    ),
    Phase("rates", "those that compare rates, one after the other", ("faults",), marked="alone"),
)


def main(arguments: list[str]) -> int:
    match arguments:
        case [("test" | "test-all") as command]:
            return run_all(command)
        case ["report"]:
            return report()
        case _:
            print(__doc__, file=sys.stderr)
            return 2


def run_all(command: str) -> int:
    """Runs every phase, also after one that failed; 1 where any of them did."""
    RESULTS.mkdir(exist_ok=True)
    for former in RESULTS.glob(f"{command}.*.xml"):
        former.unlink()
    codes = [run_phase(command, phase) for phase in PHASES]
    return int(any(code not in (_PASSED, _NO_TESTS_RAN) for code in codes))


def run_phase(command: str, phase: Phase) -> int:
    print(f"\n== {command}, {phase.name}: {phase.title} ({', '.join(phase.folders)})", flush=True)
    results = RESULTS / f"{command}.{phase.name}.xml"
    folders = [f"tests/{folder}" for folder in phase.folders]
    options = ["-m", f"{SELECTIONS[command]} and {phase.marked}", f"--junitxml={results}", *phase.distribution]
    started_s = time.monotonic()
    pytest = [sys.executable, "-m", "pytest", *folders, *options]
    # Hundreds of processes start: none of them has to compile what another one has compiled.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(pytest, cwd=ROOT, env=environment, preexec_fn=_take_interrupts)
    problem, within_s = "", _within_s()
    try:
        code = process.wait(within_s)
    except subprocess.TimeoutExpired:
        problem = f"it was stopped after {within_s:.0f} s"
        code = _stop(process)
    if code not in (_PASSED, _HAVE_FAILURES, _NO_TESTS_RAN) or not results.exists():
        _note_problem(command, phase, problem or f"pytest ended with exit code {code}")
    print(f"== {phase.name}: {time.monotonic() - started_s:.0f} s", flush=True)
    return code


def _within_s() -> float:
    until = os.environ.get("NATSLOG_TESTS_UNTIL")
    return PHASE_WITHIN_S if until is None else max(0.0, min(PHASE_WITHIN_S, float(until) - time.time()))


def _take_interrupts() -> None:
    """A shell starts what runs in its background with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _stop(process: subprocess.Popen[bytes]) -> int:
    """As Ctrl-C does, so that fixtures end their processes; killed where that is not enough."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return 2


def _note_problem(command: str, phase: Phase, problem: str) -> None:
    suite = ElementTree.Element("testsuite")
    case = ElementTree.SubElement(suite, "testcase", classname="tests.phases", name=f"{command} {phase.name}", time="0")
    ElementTree.SubElement(case, "failure", message=problem)
    ElementTree.ElementTree(suite).write(RESULTS / f"{command}.{phase.name}.problem.xml")


# ---- the report ----


@dataclass(frozen=True, slots=True)
class Case:
    """One test that ran; `took_s` with what its fixtures took."""

    name: str
    took_s: float
    outcome: Literal["passed", "failed", "skipped"]
    reason: str = ""


def report(results: Path = RESULTS) -> int:
    """Prints what `.ci/run` ends with; 1 where a test failed or none ran."""
    cases = list(cases_of(results))
    print(f"\n== the {SLOWEST} slowest tests of {len(cases)}, with their fixtures")
    for case in sorted(cases, key=lambda one: one.took_s, reverse=True)[:SLOWEST]:
        print(f"{case.took_s:8.1f} s  {case.name}")
    for outcome in ("skipped", "failed"):
        chosen = [case for case in cases if case.outcome == outcome]
        print(f"\n== {outcome}: {len(chosen) or 'none'}")
        for case in chosen:
            print(f"{case.name}: {case.reason}")
    counts = {outcome: sum(case.outcome == outcome for case in cases) for outcome in ("passed", "failed", "skipped")}
    print(f"\n== {len(cases)} tests in all")
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(counts["failed"] > 0 or not cases)


def cases_of(results: Path) -> Iterator[Case]:
    for path in sorted(results.glob("*.xml")):
        for one in ElementTree.parse(path).iter("testcase"):
            yield _case(one)


def _case(one: ElementTree.Element) -> Case:
    name = f"{one.get('classname')}::{one.get('name')}"
    outcome: Literal["passed", "failed", "skipped"] = "passed"
    reason = ""
    for child in one:
        if child.tag in ("failure", "error", "skipped"):
            outcome = "skipped" if child.tag == "skipped" and outcome == "passed" else "failed"
            reason = (child.get("message") or "").partition("\n")[0]
    return Case(name, float(one.get("time") or 0), outcome, reason)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
