"""Parts of `make bench` that need neither Kafka nor Spark: processor times, turns, ratios, and the choice of jars."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench import jars
from tests.bench.kafka.broker import properties
from tests.bench.pairs import Comparison, Measured, against, in_turn, processor_times
from tests.bench.processor_time import measured, parse_stat, processor_seconds
from tests.bench.sides import ROOT

_BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
# Prints the time of this process and of a child that has ended; another child lives on, and prints nothing.
_TREE = f"""
import os, subprocess, sys, time
burn = {_BURN!r}
subprocess.run([sys.executable, "-c", burn], check=True)
living = subprocess.Popen([sys.executable, "-c", burn + "print(flush=True); input()"], stdin=-1, stdout=-1)
living.stdout.readline()
exec(burn)
times = os.times()
print(times.user + times.system + times.children_user + times.children_system, flush=True)
input()
living.communicate(b"\\n")
"""


@pytest.mark.parametrize("name", ["python", "a b", "x) S 1 (y", "(sd-pam)"])
def test_stat_of_a_program_with_any_name_is_parsed(name: str) -> None:
    stat = parse_stat(f"42 ({name}) S 7 42 42 0 -1 4194560 900 10 0 0 11 22 33 44 20 0 1 0 555 1000 200 0\n")
    assert (stat.parent, stat.ticks) == (7, 11 + 22 + 33 + 44)


def test_stat_of_this_process_names_its_parent() -> None:
    assert parse_stat(Path("/proc/self/stat").read_text()).parent == os.getppid()


def test_processor_time_is_that_of_a_process_its_ended_and_its_living_children() -> None:
    with subprocess.Popen([sys.executable, "-c", _TREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        own_and_ended = float(process.stdout.readline())
        found = processor_seconds([process.pid])
        process.communicate(b"\n")
    assert own_and_ended >= 0.55
    assert 0.25 <= found - own_and_ended <= 0.6, "the living child took 0.3 s and its start"


def test_processor_time_of_a_process_that_does_not_exist_is_an_error() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError, match=str(process.pid)):
        processor_seconds([process.pid])


def test_measured_run_has_its_rate_and_the_processor_time_of_a_row() -> None:
    def burn() -> None:
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass

    done = measured(1000, [os.getpid()], burn)
    assert done.cpu_us >= 180
    assert done.rate <= 1000 / 0.2


def test_sides_run_in_turn_in_alternating_order() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[], Measured]:
        return lambda: order.append(name) or Measured(len(order), 2.0)  # type: ignore[func-returns-value]

    found = in_turn("title", {name: side(name) for name in "abc"}, 2)
    assert order == ["a", "b", "c", "c", "b", "a"]
    assert [run.rate for run in found["a"]] == [1, 6]


def test_comparison_is_the_median_of_the_ratios_of_pairs_with_processor_times() -> None:
    ours, theirs = [Measured(10, 1.0), Measured(30, 2.0), Measured(10, 3.0)], [Measured(10, 2.0)] * 3
    line = against("title", "rows/s", 2, ours, "peer", theirs)
    assert (line.figure, line.holds, line.our_cpu_us) == (1, False, [1.0, 2.0, 3.0])
    times = processor_times("title", 0.9, ours, "peer", theirs)
    assert (times.ratios, times.holds) == ([2.0, 1.0, 2 / 3], True)


def test_comparison_holds_where_its_alternative_does() -> None:
    missed = Comparison("title", "rows/s", 2, "peer", [1.0], [1.0])
    for theirs, holds in ((1.0, True), (2.0, False)):
        missed.alternative = Comparison("title", "rows/s", 0.9, "other", [1.0], [theirs])
        assert missed.holds is holds


def test_line_without_a_bar_has_no_verdict() -> None:
    assert not Comparison("title", "rows/s", 0, "peer", [1.0], [1.0]).has_bar
    assert Comparison("title", "rows/s", 0, ours=[1.0], is_bound=True).has_bar


def _jar(module: str, version: str) -> Path:
    return Path(f"ivy/org.example/{module}/jars/{module}-{version}.jar")


def test_jars_whose_module_spark_has_in_any_version_are_left_out() -> None:
    connector = _jar("spark-sql-kafka-0-10_2.13", "4.2.0")
    resolved = [connector, _jar("kafka-clients", "3.9.2"), _jar("scala-library", "2.13.18")]
    present = ["scala-library-2.13.17.jar", "spark-sql_2.13-4.3.0.jar", "kafka-clients-extra-1.0.jar"]
    assert jars.without(resolved, present) == resolved[:2]
    assert (jars.module_of(connector), jars.version_of(connector)) == ("spark-sql-kafka-0-10_2.13", "4.2.0")


def test_resolved_jars_are_taken_from_the_cache_unless_one_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jars, "CACHE", tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    there = tmp_path / "some-1.0.jar"
    there.touch()
    (tmp_path / "some-_1.0_.classpath").write_text(str(there))
    assert jars.resolve("org.example", "some", "[1.0]") == [there]
    there.unlink()
    with pytest.raises(FileNotFoundError, match="nowhere"):  # it would be downloaded again
        jars.resolve("org.example", "some", "[1.0]")


def test_kafka_listens_on_loopback_only(tmp_path: Path) -> None:
    settings = dict(line.split("=", 1) for line in properties(tmp_path, 9, 10).splitlines())
    assert settings["listeners"] == "PLAINTEXT://127.0.0.1:9,CONTROLLER://127.0.0.1:10"
    assert settings["log.dirs"] == f"{tmp_path}/data"


@pytest.mark.long
@pytest.mark.parametrize(
    ("only", "error"),
    [
        ("nothing", "there are publish, "),
        ("kafka-nothing", "there are kafka-columnar, kafka-scan, "),
        ("scan,kafka", "without others"),
    ],
)
def test_parts_that_cannot_run_are_refused_before_anything_starts(only: str, error: str) -> None:
    command = [sys.executable, "-m", "tests.bench", "--only", only]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert error in done.stderr
