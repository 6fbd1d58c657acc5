"""`make affected SINCE=commit`: the long tests whose subject has changed since then, most telling first.

    python -m tests.affected COMMIT

A table states the tests of each folder of the product. For each changed file, those of the first matching row run;
changed tests run before all others. It stops after `WITHIN_S`, and prints which files it left out. Tests marked `alone`
are left out, because two files run at once. Results are kept in `.test-results/` with the commit, as those of `make
test-all`, which runs all long tests: this is no replacement.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

from tests.phases import (
    RESULTS,
    ROOT,
    SELECTIONS,
    cases_of,
    interrupt_on_sigterm,
    note_problem,
    prepare,
    present_commit,
    remove_problem,
    start_pytest,
    stop,
)

WITHIN_S = 15 * 60.0
_AT_ONCE = 2
_CHECK_EVERY_S = 0.2
_NOTHING_RAN, _HAVE_FAILURES, _PASSED = 5, 1, 0
_SELECTION = f"{SELECTIONS['test-all']} and not alone"

_FAULTS = ("faults/test_cluster_faults.py", "faults/test_kill.py", "faults/test_power_loss.py")
_CLUSTERS = ("integration/test_cluster.py", "integration/test_upgrade.py", "integration/test_rebalance.py")
_REMOVAL = ("integration/test_removal.py", "integration/test_removal_in_clusters.py", "integration/test_erasure.py")
_CONSUMERS = ("jetstream/test_failover.py", "jetstream/test_linearizable.py", "jetstream/")
_SOURCE = (
    "spark/test_stream.py",
    "columnar/test_stream.py",
    "integration/test_stream_reader.py",
    "columnar/",
    "spark/",
)
_SECURITY = ("integration/test_tls.py", "integration/test_peer_attacks.py", "integration/test_nats_auth.py")
TABLE: Sequence[tuple[str, Sequence[str]]] = (
    ("broker/natslog/arrow/", ("unit/arrow/", "unit/log/", "columnar/test_oracle.py", "integration/")),
    ("broker/natslog/wire/", ("unit/wire/", "integration/test_leaf.py", "unit/ingest/", "jetstream/", "integration/")),
    ("broker/natslog/log/", ("unit/log/", "faults/test_power_loss.py", "faults/test_scrub.py", *_REMOVAL, "faults/")),
    ("broker/natslog/ingest/", ("unit/ingest/", "faults/test_kill.py", *_FAULTS, "integration/")),
    ("broker/natslog/consensus/", ("sim/", *_FAULTS, *_CLUSTERS, "chaos/")),
    ("broker/natslog/cluster/", ("sim/", "unit/cluster/", *_FAULTS, *_CLUSTERS, "chaos/")),
    ("broker/natslog/node/", ("unit/node/", "sim/", *_FAULTS, *_CLUSTERS, *_REMOVAL, "faults/", "chaos/")),
    ("broker/natslog/security/", (*_SECURITY, "integration/test_secret_rotation.py", "spark/test_access.py")),
    ("broker/natslog/http/", ("integration/test_http.py", "faults/test_hostile_clients.py", "integration/")),
    ("broker/natslog/jetstream/", ("sim/test_consumer.py", "sim/test_consumer_mutations.py", *_CONSUMERS)),
    ("broker/natslog/client/", ("unit/client/", "integration/test_consume.py", *_SOURCE)),
    ("broker/natslog/backup/", ("integration/test_backup.py", "integration/test_backup_removals.py")),
    ("broker/natslog/declared/", ("integration/test_apply.py",)),
    ("broker/natslog/migration/", ("integration/test_jetstream_import.py",)),
    ("broker/natslog/tables/", ("integration/test_tables.py", "columnar/test_table_job.py")),
    ("broker/natslog/sql/", ("integration/test_sql.py",)),
    ("broker/natslog/console/", ("console/",)),
    ("broker/natslog/diagnosis/", ("integration/test_doctor.py", "integration/test_support_bundle.py")),
    ("broker/natslog/tracing/", ("integration/test_tracing.py", "unit/test_tracing.py")),
    ("broker/natslog/cli/", ("integration/test_cli.py", "integration/test_top.py", "integration/test_played_pages.py")),
    ("broker/", ("unit/", *_FAULTS, "integration/", "jetstream/", "sim/", "spark/")),
    ("connector/jvm/", ("columnar/",)),
    ("connector/pyspark_natslog/sink/", ("spark/test_sink.py", "spark/test_http_sink.py", "soak/")),
    ("connector/pyspark_natslog/payload/", ("unit/connector/payload/", "spark/test_payload.py", "columnar/")),
    ("connector/", (*_SOURCE, "soak/")),
    ("console/", ("console/",)),
    ("deploy/", ("integration/test_deploy.py",)),
    ("spark_jobs/", ("spark/test_jobs.py", "spark/test_publishing_jobs.py", "columnar/test_table_job.py")),
    ("notebooks/", ("spark/test_notebook.py",)),
    ("docs/", ("integration/test_played_pages.py", "spark/test_spark_page.py")),
    ("README.md", ("integration/test_played_pages.py",)),
    ("pyproject.toml", ("integration/test_install.py", "integration/test_upgrade.py")),
)


def chosen(changed: Iterable[str]) -> tuple[list[str], list[str]]:
    """Test files and folders, below `tests/`, for these files of the repository, most telling first; and the files for
    which there are none.
    """
    tests, rows, unknown = [], [], []
    for path in sorted(changed):
        parts = path.split("/")
        row = next((found for folder, found in TABLE if path.startswith(folder)), None)
        if parts[0] == "tests" and parts[-1].startswith("test_"):
            tests.append("/".join(parts[1:]))
        elif parts[0] == "tests" and len(parts) > 2 and parts[-1].endswith(".py"):
            tests.append(parts[1] + "/")  # what the tests of a folder share
        elif row is not None:
            rows.append(row)
        else:
            unknown.append(path)
    for rank in range(max(map(len, rows), default=0)):  # the most telling ones of every subject, then the next
        tests += [row[rank] for row in rows if rank < len(row)]
    return list(dict.fromkeys(tests)), unknown


def in_order(wanted: Sequence[str], collected: Iterable[str]) -> list[str]:
    """Files of the collected tests, `tests/…/test_x.py::test_y`, in the order in which they are wanted."""
    files = list(dict.fromkeys(one.partition("::")[0] for one in collected if "::" in one))
    matching = [file for path in wanted for file in files if file.startswith(f"tests/{path}")]
    return list(dict.fromkeys(matching))


def changed_since(commit: str) -> list[str]:
    """Files that differ from it now, also uncommitted, new and deleted ones. Raises SystemExit: there is no such
    commit.
    """
    if _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}").returncode:
        raise SystemExit(f"SINCE={commit} is not a commit; for example: make affected SINCE=HEAD~5")
    changed, new = _git("diff", "--name-only", commit, "--"), _git("ls-files", "--others", "--exclude-standard")
    return changed.stdout.splitlines() + new.stdout.splitlines()


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def long_tests_of(wanted: Sequence[str]) -> list[str]:
    """The files that have some, in this order."""
    paths = [f"tests/{one}" for one in wanted if (ROOT / "tests" / one).exists()]
    if not paths:
        return []
    pytest = [sys.executable, "-m", "pytest", "--collect-only", "-m", _SELECTION, *paths]
    done = subprocess.run(pytest, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (_PASSED, _NOTHING_RAN):
        raise SystemExit(f"the tests cannot be collected:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    assert done.returncode == _NOTHING_RAN or "::" in done.stdout, "pytest prints the tests that it collects"
    return in_order(wanted, done.stdout.splitlines())


class Runs:
    """Runs files, some at once, until the time is over. Attributes: `failed`, and `left_out` (not finished): files."""

    def __init__(self, files: Sequence[str], environment: Mapping[str, str], until_s: float) -> None:
        self.failed: list[str] = []
        self.left_out: list[str] = []
        self._environment, self._until_s = environment, until_s
        self._waiting = list(files)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        """After ^C, too, all that runs is stopped, and all that did not end is left out."""
        try:
            while (self._waiting or self._running) and time.monotonic() < self._until_s:
                while self._waiting and len(self._running) < _AT_ONCE:
                    self._start(self._waiting.pop(0))
                self._note_ended()
                time.sleep(_CHECK_EVERY_S)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
        self.left_out = [*self._running, *self._waiting]
        for process in self._running.values():
            stop(process)

    def _start(self, file: str) -> None:
        name = _name_of(file)
        (RESULTS / f"{name}.commit").write_text(present_commit())
        note_problem(name, "it did not end")
        # One process beside that of pytest, in which tests may handle the signal that stops it.
        pytest = [sys.executable, "-m", "pytest", "-q", "-n1", "--hypothesis-profile=ci", "-m", _SELECTION, file]
        self._running[file] = start_pytest([*pytest, f"--junitxml={RESULTS / name}.xml"], self._environment)

    def _note_ended(self) -> None:
        for file, process in list(self._running.items()):
            if (code := process.poll()) is None:
                continue
            del self._running[file]
            if code in (_PASSED, _HAVE_FAILURES, _NOTHING_RAN):
                remove_problem(_name_of(file))
            cases = cases_of(RESULTS, _name_of(file))
            failed = sum(case.outcome == "failed" for case in cases)
            print(f"\n{file}: {len(cases)} tests, {failed} failed, exit code {code}", flush=True)
            if code not in (_PASSED, _NOTHING_RAN):
                self.failed.append(file)


def _name_of(file: str) -> str:
    return f"affected.{file.removeprefix('tests/').removesuffix('.py').replace('/', '.')}"


def main(commit: str) -> int:
    interrupt_on_sigterm()
    until_s = time.monotonic() + WITHIN_S
    wanted, unknown = chosen(changed_since(commit))
    if unknown:
        print(f"changed files without an entry in the table: {' '.join(unknown)}")
    files = long_tests_of(wanted)
    print(f"{len(files)} files with long tests, most telling first: {' '.join(files) or 'none'}", flush=True)
    if not files:
        return 0
    environment = prepare()
    for former in RESULTS.glob("affected.*"):
        former.unlink()
    runs = Runs(files, environment, until_s)
    runs.run()
    for title, found in (("failed", runs.failed), ("not finished", runs.left_out)):
        print(f"\n== {title}: {len(found) or 'none'}", *found, sep="\n")
    return int(bool(runs.failed))


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1]:
        raise SystemExit("SINCE is missing; for example: make affected SINCE=HEAD~5")
    sys.exit(main(sys.argv[1]))
