"""`make fuzz`: every target for some minutes, two at a time; a table at the end, exit code 1 if there is a finding.

python -m tests.fuzz [--minutes M] [--target NAME]… [--seed N]
python -m tests.fuzz replay TARGET FILE
python -m tests.fuzz list
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.engine import MOST_RSS_MIB, WITHIN_S
from tests.fuzz.target import MOST_BYTES
from tests.fuzz.targets import TARGETS, Target

ROOT = Path(__file__).resolve().parents[2]
FINDINGS = ROOT / ".fuzz-findings"
"""Ignored by git: an input that is fixed goes to `corpus/TARGET/`. `FINDINGS/kept` keeps inputs with new coverage."""
_PROGRESS = re.compile(r"#(\d+)\s.*cov: (\d+).*corp: (\d+)/.*exec/s: (\d+)")
_EVERY_S = 30.0
_printing = threading.Lock()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one target: inputs run, coverage (edges in instrumented code), seconds, and files that found something."""

    target: Target
    inputs: int
    coverage: int
    took_s: float
    findings: list[Path]
    problem: str = ""


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["replay"] and len(arguments) == 3:
        TARGETS[arguments[1]].run(Path(arguments[2]).read_bytes())
        print("the invariant holds:", TARGETS[arguments[1]].invariant)
        return 0
    if arguments == ["list"]:
        print("\n".join(f"{one.name:16} {one.invariant}" for one in TARGETS.values()))
        return 0
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), default=[])
    parser.add_argument("--seed", type=int, default=0, help="of libFuzzer; 0: another one each time")
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    given = parser.parse_args(arguments)
    if importlib.util.find_spec("atheris") is None:
        print("natslog: make fuzz needs atheris, which has wheels for Linux on x86-64 only", file=sys.stderr)
        return 2
    return fuzz(
        [TARGETS[name] for name in given.target] or list(TARGETS.values()), given.minutes, given.seed, given.at_once
    )


def fuzz(targets: list[Target], minutes: float, seed: int, at_once: int) -> int:
    print(f"{len(targets)} targets, {minutes:g} minutes each, {at_once} at a time", flush=True)
    with ThreadPoolExecutor(at_once) as pool:
        outcomes = list(pool.map(lambda one: run(one, minutes, seed), targets))
    print(f"\n{'target':16} {'inputs':>11} {'per s':>7} {'edges':>6} {'seconds':>8}  result")
    for one in outcomes:
        result = one.problem or (f"{len(one.findings)} findings" if one.findings else "the invariant holds")
        rate = one.inputs / max(one.took_s, 0.1)
        print(f"{one.target.name:16} {one.inputs:11,} {rate:7,.0f} {one.coverage:6} {one.took_s:8.0f}  {result}")
    failed = [one for one in outcomes if one.findings or one.problem]
    for one in failed:
        for path in one.findings:
            print(f"replay: {sys.executable} -m tests.fuzz replay {one.target.name} {path.relative_to(ROOT)}")
    return int(bool(failed))


def run(target: Target, minutes: float, seed: int) -> Outcome:
    """One target until its time is up, or until it finds something."""
    folder = FINDINGS / target.name
    kept = FINDINGS / "kept" / target.name
    for each in (folder, kept):
        each.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    with tempfile.TemporaryDirectory() as scratch:
        seeds, words = Path(scratch) / "seeds", Path(scratch) / "words"
        seeds.mkdir()
        for at, data in enumerate(target.seeds()):
            (seeds / f"{at:04d}").write_bytes(data[:MOST_BYTES])
        words.write_text("".join(f'"{_escaped(token)}"\n' for token in target.tokens))
        command = [
            sys.executable, "-m", "tests.fuzz.engine", target.check.__module__, target.name,
            f"-max_total_time={minutes * 60:.0f}",
            f"-max_len={MOST_BYTES}", f"-timeout={WITHIN_S}", f"-rss_limit_mb={MOST_RSS_MIB}", f"-seed={seed}",
            f"-artifact_prefix={folder}/", "-print_final_stats=1", *([f"-dict={words}"] if target.tokens else []),
            str(kept), str(seeds), *([str(target.corpus()[0].parent)] if target.corpus() else []),
        ]  # fmt: skip
        started_s = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        inputs, coverage, last = _watched(process, target.name)
    took_s = time.monotonic() - started_s
    findings = sorted(set(folder.iterdir()) - before)
    with _printing:
        print(f"{target.name:16} {inputs:11,} inputs in {took_s:.0f} s, {coverage} edges: ended", flush=True)
    if findings:
        (folder / f"{findings[0].name}.txt").write_text("".join(last))
        with _printing:
            print(f"{target.name}: FOUND {findings[0].name}\n{''.join(last[-25:])}", flush=True)
    problem = f"the process ended with {process.returncode}" if process.returncode and not findings else ""
    if problem:
        with _printing:
            print(f"{target.name}: {problem}\n{''.join(last[-40:])}", flush=True)
    return Outcome(target, inputs, coverage, took_s, [path for path in findings if path.suffix != ".txt"], problem)


def _watched(process: subprocess.Popen[str], name: str) -> tuple[int, int, list[str]]:
    """Inputs run, coverage, and the last lines of the output."""
    inputs = coverage = 0
    last: list[str] = []
    shown_s = time.monotonic()
    assert process.stdout is not None
    for line in process.stdout:
        last = [*last[-200:], line]
        if (found := _PROGRESS.search(line)) is not None:
            inputs, coverage = max(inputs, int(found[1])), int(found[2])
            if time.monotonic() - shown_s > _EVERY_S:
                shown_s = time.monotonic()
                with _printing:
                    print(f"{name:16} {inputs:11,} inputs, {found[4]} per s, {coverage} edges", flush=True)
        elif line.startswith("stat::number_of_executed_units:"):
            inputs = int(line.split(":")[-1])
    process.wait()
    return inputs, coverage, last


def _escaped(token: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in token)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
