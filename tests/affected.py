"""`make affected SINCE=commit`: the long tests whose subject has changed since then, most telling first.

    python -m tests.affected COMMIT

A table says which tests a folder of the product is a subject of. Those of the first matching row run for each changed
file; changed tests themselves run first. It stops after `WITHIN_S`, and prints which files it left out. Results are
kept in `.test-results/` with the commit, as those of `make test-all`, which runs all of them: this is no replacement.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue

from tests.phases import RESULTS, ROOT, SELECTIONS, prepare, present_commit, run_until

WITHIN_S = 15 * 60.0
_AT_ONCE = 2
_NOTHING_RAN, _PASSED = 5, 0

_FAULTS = ("faults/test_cluster_faults.py", "faults/test_kill.py", "faults/test_power_loss.py")
_CONSUMERS = ("jetstream/test_failover.py", "jetstream/test_linearizable.py", "jetstream/")
_SOURCE = (
    "spark/test_stream.py",
    "columnar/test_stream.py",
    "integration/test_stream_reader.py",
    "columnar/",
    "spark/",
)
TABLE: Sequence[tuple[str, Sequence[str]]] = (
    ("broker/natslog/arrow/", ("unit/arrow/", "unit/log/", "golden/", "columnar/test_oracle.py", "integration/")),
    ("broker/natslog/wire/", ("unit/wire/", "unit/ingest/", "integration/test_leaf.py", "integration/test_link.py")),
    ("broker/natslog/log/", ("unit/log/", "faults/test_power_loss.py", "faults/test_scrub.py", "faults/", "golden/")),
    ("broker/natslog/ingest/", ("unit/ingest/", "integration/test_ingest.py", *_FAULTS, "integration/")),
    ("broker/natslog/consensus/", ("sim/", "unit/consensus/", *_FAULTS, "chaos/")),
    ("broker/natslog/cluster/", ("sim/", "unit/cluster/", "integration/test_upgrade.py", *_FAULTS, "chaos/")),
    ("broker/natslog/node/", ("unit/node/", "sim/", *_FAULTS, "faults/", "chaos/", "integration/test_upgrade.py")),
    ("broker/natslog/security/", ("unit/security/", "integration/test_access.py", "integration/test_tls.py")),
    (
        "broker/natslog/http/",
        ("unit/http/", "integration/test_http.py", "faults/test_hostile_clients.py", "integration/"),
    ),
    ("broker/natslog/jetstream/", ("sim/test_consumer.py", "sim/test_consumer_mutations.py", *_CONSUMERS)),
    ("broker/natslog/client/", ("unit/client/", "integration/test_consume.py", *_SOURCE)),
    ("broker/natslog/backup/", ("integration/test_backup.py", "integration/test_backup_removals.py")),
    ("broker/natslog/declared/", ("integration/test_apply.py",)),
    ("broker/natslog/migration/", ("integration/test_jetstream_import.py",)),
    ("broker/natslog/tables/", ("integration/test_tables.py", "columnar/test_table_job.py")),
    ("broker/natslog/sql/", ("integration/test_sql.py",)),
    ("broker/natslog/console/", ("console/",)),
    (
        "broker/natslog/diagnosis/",
        ("unit/diagnosis/", "integration/test_doctor.py", "integration/test_support_bundle.py"),
    ),
    ("broker/natslog/tracing/", ("unit/test_tracing.py", "integration/test_tracing.py", "spark/test_tracing.py")),
    ("broker/natslog/cli/", ("integration/test_cli.py", "integration/test_top.py", "integration/test_played_pages.py")),
    ("broker/", ("unit/", *_FAULTS, "integration/")),
    ("connector/jvm/", ("columnar/",)),
    ("connector/pyspark_natslog/sink/", ("spark/test_sink.py", "spark/test_http_sink.py", "soak/")),
    ("connector/pyspark_natslog/payload/", ("unit/connector/payload/", "spark/test_payload.py", "columnar/")),
    ("connector/", (*_SOURCE, "soak/")),
    ("console/", ("console/",)),
    ("deploy/", ("integration/test_deploy.py", "faults/test_alerts.py")),
    ("spark_jobs/", ("spark/test_jobs.py", "spark/test_publishing_jobs.py", "columnar/test_table_job.py")),
    ("notebooks/", ("spark/test_notebook.py",)),
    ("docs/", ("integration/test_played_pages.py", "spark/test_spark_page_commands.py")),
    ("pyproject.toml", ("integration/test_install.py", "integration/test_upgrade.py")),
)


def chosen(changed: Iterable[str]) -> list[str]:
    """Test files and folders, below `tests/`, for these files of the repository; most telling first."""
    changed = list(changed)
    found = [path.removeprefix("tests/") for path in changed if path.startswith("tests/") and "/test_" in path]
    rows = [next((tests for folder, tests in TABLE if path.startswith(folder)), ()) for path in sorted(changed)]
    for rank in range(max(map(len, rows), default=0)):  # the most telling ones of every subject, then the next
        found += [row[rank] for row in rows if rank < len(row)]
    return list(dict.fromkeys(found))


def in_order(wanted: Sequence[str], collected: Iterable[str]) -> list[str]:
    """Files of the collected tests, `tests/…/test_x.py::test_y`, in the order in which they are wanted."""
    files = list(dict.fromkeys(one.partition("::")[0] for one in collected if "::" in one))
    matching = [file for path in wanted for file in files if file.startswith(f"tests/{path}")]
    return list(dict.fromkeys(matching))


def changed_since(commit: str) -> list[str]:
    """Files that differ from it now, committed or not. Raises SystemExit: there is no such commit."""
    asked = ["git", "diff", "--name-only", "--diff-filter=d", commit]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"make affected SINCE=commit: {done.stderr.strip()}")
    return done.stdout.splitlines()


def long_tests_of(wanted: Sequence[str]) -> list[str]:
    """The files that have some, in this order."""
    paths = [f"tests/{one}" for one in wanted if (ROOT / "tests" / one).exists()]
    if not paths:
        return []
    pytest = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", SELECTIONS["test-all"], *paths]
    done = subprocess.run(pytest, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (_PASSED, _NOTHING_RAN):
        raise SystemExit(f"the tests cannot be collected:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return in_order(wanted, done.stdout.splitlines())


class Runs:
    """Runs files, some at once, until the time is over. Attributes: `failed`, `left_out`: files."""

    def __init__(self, files: Sequence[str], environment: Mapping[str, str], until_s: float) -> None:
        self.failed: list[str] = []
        self.left_out: list[str] = []
        self._environment, self._until_s = environment, until_s
        self._waiting: SimpleQueue[str] = SimpleQueue()
        for file in files:
            self._waiting.put(file)

    def run(self) -> None:
        workers = [threading.Thread(target=self._work) for _ in range(_AT_ONCE)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _work(self) -> None:
        while True:
            try:
                file = self._waiting.get_nowait()
            except Empty:
                return
            within_s = self._until_s - time.monotonic()
            if within_s <= 0:
                self.left_out.append(file)
                continue
            self._run(file, within_s)

    def _run(self, file: str, within_s: float) -> None:
        name = f"affected.{file.removeprefix('tests/').removesuffix('.py').replace('/', '.')}"
        (RESULTS / f"{name}.commit").write_text(present_commit())
        pytest = [sys.executable, "-m", "pytest", "-q", "--hypothesis-profile=ci", "-m", SELECTIONS["test-all"], file]
        code, is_stopped = run_until([*pytest, f"--junitxml={RESULTS / name}.xml"], within_s, self._environment)
        if is_stopped:
            self.left_out.append(file)
        elif code not in (_PASSED, _NOTHING_RAN):
            self.failed.append(file)


def main(commit: str) -> int:
    until_s = time.monotonic() + WITHIN_S
    wanted = chosen(changed_since(commit))
    files = long_tests_of(wanted)
    print(f"{len(files)} files with long tests, most telling first: {' '.join(files) or 'none'}", flush=True)
    environment = prepare()
    for former in RESULTS.glob("affected.*"):
        former.unlink()
    runs = Runs(files, environment, until_s)
    runs.run()
    for title, found in (("failed", runs.failed), (f"left out after {WITHIN_S / 60:.0f} minutes", runs.left_out)):
        print(f"\n== {title}: {len(found) or 'none'}", *found, sep="\n")
    return int(bool(runs.failed))


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1]:
        raise SystemExit("which tests are affected is computed from a commit: make affected SINCE=commit")
    sys.exit(main(sys.argv[1]))
