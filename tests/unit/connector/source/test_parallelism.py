"""The number of tasks follows Spark's parallelism and the limits of containers, not the processors of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyspark_natslog.source.parallelism import available_processors, default_parallelism, stated_parallelism

JAVA = ["/usr/bin/java", "-cp", "x", "org.apache.spark.deploy.SparkSubmit"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--conf", "spark.master=local[2]", "pyspark-shell"], 2),
        (["--master", "local[3]", "job.py"], 3),
        (["--conf", "spark.master=local[2, 4]"], 2),
        (["--conf", "spark.master=local"], 1),
        (["--conf", "spark.master=local[*]"], None),
        (["--conf", "spark.master=spark://host:7077"], None),
        (["--conf", "spark.master=spark://host:7077", "--conf", "spark.default.parallelism=24"], 24),
        (["--conf", "spark.master=local[2]", "--conf", "spark.default.parallelism=0"], 2),
        ([], None),
    ],
)
def test_parallelism_is_that_of_the_command_line(words: list[str], expected: int | None) -> None:
    assert stated_parallelism([*JAVA, *words]) == expected


def machine(folder: Path, command: list[str], cgroup: str, **files: str) -> tuple[Path, Path]:
    """`/proc` and `/sys/fs/cgroup` in which this process is a child of a daemon, which is a child of `command`."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    for pid, parent, words in ((os.getppid(), 4_000_000, ["python", "pyspark.daemon"]), (4_000_000, 1, command)):
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "cmdline").write_text("\0".join(words))
        (proc / str(pid) / "stat").write_text(f"{pid} (a) b) S {parent} 1")
    (proc / "self").mkdir()
    (proc / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = cgroups / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroups


def test_spark_of_this_process_is_found(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, [*JAVA, "--conf", "spark.master=local[7]"], "0::/\n")
    assert default_parallelism(proc, cgroups) == 7


def test_without_spark_it_is_the_number_of_available_processors(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, ["bash"], "0::/\n")
    assert default_parallelism(proc, cgroups) == len(os.sched_getaffinity(0))
    assert default_parallelism(tmp_path / "none", tmp_path / "none") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/\n", {"cpu_dot_max": "100000 100000"}),
        ("0::/pod/task\n", {"pod__cpu_dot_max": "50000 100000", "pod__task__cpu_dot_max": "max 100000"}),
        (
            "4:cpu,cpuacct:/pod\n2:memory:/pod\n0::/\n",
            {"cpu__pod__cpu_dot_cfs_quota_us": "90000", "cpu__pod__cpu_dot_cfs_period_us": "100000"},
        ),
    ],
)
def test_quotas_of_containers_limit_the_processors(tmp_path: Path, cgroup: str, files: dict[str, str]) -> None:
    proc, cgroups = machine(tmp_path, ["bash"], cgroup, **files)
    assert available_processors(proc, cgroups) == 1


def test_a_quota_above_the_cpu_set_or_none_changes_nothing(tmp_path: Path) -> None:
    files = {"cpu_dot_max": "max 100000", "pod__cpu_dot_max": "9900000 100000"}
    proc, cgroups = machine(tmp_path, ["bash"], "0::/pod\n", **files)
    assert available_processors(proc, cgroups) == len(os.sched_getaffinity(0))
