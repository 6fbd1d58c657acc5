"""Checks as functions of facts, the list of all checks, and how failures of probes and checks are reported."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from natslog.config import BrokerConfig
from natslog.diagnosis import doctor
from natslog.diagnosis.checks import cluster, disk, machine, nats, production, secrets
from natslog.diagnosis.doctor import CHECKS, PRODUCTION, SETTINGS, Check, diagnose
from natslog.diagnosis.examined import (
    BrokerFacts,
    ClusterFacts,
    Examined,
    FolderFacts,
    LatencyFacts,
    Limits,
    MachineFacts,
    Missing,
    NatsFacts,
    SecretFacts,
)
from natslog.diagnosis.outcomes import Outcome, State
from natslog.diagnosis.probes import folder
from natslog.wire.probing import LeafFacts, ServerFacts

OPERATIONS = Path(__file__).parents[3] / "docs" / "OPERATIONS.md"
NOW_S = 1_800_000_000.0
DAY_S = 86400.0
GIB = 1024**3

LIMITS = Limits(process=None, user=1000, files_soft=1024, files_hard=65536, open_files=None, memory_bytes=None)
MACHINE = MachineFacts(
    user=1000,
    processors=2.0,
    memory_bytes=8 * GIB,
    available_bytes=6 * GIB,
    limits=LIMITS,
    clock_synchronized=True,
    clock_error_s=0.01,
    python="3.12.1",
    versions={"natslog": "0.2.0", "pyarrow": "20"},
    missing=[],
)
FOLDER = FolderFacts(
    folder="/d",
    exists=True,
    measured="/d",
    file_system="ext4",
    source="/dev/sda1",
    mount_options=["rw"],
    free_bytes=50 * GIB,
    total_bytes=100 * GIB,
    free_files=10**6,
    owner=1000,
    mode=0o700,
    is_writable=True,
    broker_id=1,
)
LATENCY = LatencyFacts(small_ms=[1.0] * 50, large_ms=[5.0] * 5)
SERVER = ServerFacts(url="nats://a", version="2.15.1", max_payload_bytes=2**20, round_trips_ms=[0.2, 0.3])
NATS = NatsFacts(servers=[SERVER])
CLUSTER = ClusterFacts(
    servers=["http://127.0.0.1:9292"],
    cluster={
        "cluster_id": "own",
        "is_current": True,
        "streams": 3,
        "feature_level": 2,
        "supported_level": 2,
        "brokers": [{"id": one, "role": "voter", "alive": True} for one in (1, 2, 3)],
    },
    has_security=True,
    brokers=[
        BrokerFacts(id=one, url=f"http://b{one}", version="0.2.0", alive=[1, 2, 3], nats_connections_lost=0)
        for one in (1, 2, 3)
    ],
)
SECRETS = SecretFacts(problems={}, used=1)
HEALTHY = Examined(
    config=BrokerConfig(data_dir="/d"),
    config_problem="",
    now_s=NOW_S,
    machine=MACHINE,
    folder=FOLDER,
    latency=LATENCY,
    nats=NATS,
    cluster=CLUSTER,
    secrets=SECRETS,
)


def but(facts: Any, **changed: Any) -> Any:
    return msgspec.structs.replace(facts, **changed)


def test_healthy_facts_have_no_problem() -> None:
    report = diagnose(HEALTHY)
    assert [one for one in report.outcomes if one.state != "ok"] == []
    assert (report.problems, report.warnings) == (0, 0)
    assert {one.check for one in report.outcomes} >= {check.name for check in CHECKS} - {"nats.certificate"} - {
        *("security.certificate", "security.administrator")
    }


@pytest.mark.parametrize(
    ("is_foreign", "identity", "state"),
    [(True, "admin", "warning"), (True, "natslog-root", "ok"), (False, "admin", "ok")],
)
def test_ca_of_others_may_name_the_administrator(is_foreign: bool, identity: str, state: str) -> None:
    config = BrokerConfig(security=True, tls_ca_file="ca.pem", admin_identity=identity)
    facts = but(SECRETS, trusts_other_ca=is_foreign)
    examined = replace(HEALTHY, secrets=facts, config=config)
    (found,) = [one for one in diagnose(examined).outcomes if one.check == "security.administrator"]
    assert found.state == state


def server(**changed: Any) -> NatsFacts:
    return NatsFacts(servers=[but(SERVER, **changed)])


def limits(**changed: Any) -> MachineFacts:
    return but(MACHINE, limits=but(LIMITS, **changed))


def members(**changed: Any) -> ClusterFacts:
    return but(CLUSTER, cluster=CLUSTER.cluster | changed)


def broker(number: int, **changed: Any) -> ClusterFacts:
    return but(CLUSTER, brokers=[but(one, **changed) if one.id == number else one for one in CLUSTER.brokers])


def alive(*up: int, voters: int = 3) -> list[dict[str, Any]]:
    return [{"id": one, "role": "voter", "alive": one in up} for one in range(1, voters + 1)]


Find = Callable[[Any, Examined], Iterator[Outcome]]
CASES: list[tuple[Find, Any, State, str]] = [
    (nats.login, server(problem="no answer"), "problem", "no answer"),
    (nats.login, NatsFacts(servers=[SERVER, but(SERVER, url="nats://b", problem="x")]), "warning", "nats://b"),
    (nats.login, NatsFacts(servers=[SERVER, but(SERVER, problem="x", is_login_refused=True)]), "problem", "x"),
    (nats.version, server(version="2.9.25"), "warning", "2.9.25"),
    (nats.version, server(version="2.14.0-RC.1"), "ok", "2.14.0"),
    (nats.version, server(version=""), "warning", "unknown"),
    (nats.round_trip, server(round_trips_ms=[80.0, 90.0]), "warning", "85.0 ms, at most 90.0 ms"),
    (nats.max_payload, server(max_payload_bytes=65536), "warning", "65,536"),
    (nats.permissions, server(refused=["subscribe to a.>"]), "problem", "subscribe to a.>"),
    (nats.jetstream, server(api_clusters=["own"]), "ok", "no other"),
    (nats.jetstream, server(api_clusters=["other", "own"]), "warning", "another natslog cluster"),
    (nats.jetstream, server(api_server=True), "warning", "domain natslog"),
    (nats.certificate, server(certificate_expires_s=NOW_S + 3 * DAY_S), "warning", "3 days"),
    (nats.certificate, server(certificate_expires_s=NOW_S + 90 * DAY_S), "ok", "90 days"),
    (nats.leafnode, NatsFacts(servers=[], leaves=[LeafFacts(url="a", problem="refused")]), "problem", "refused"),
    (nats.leafnode, NatsFacts(servers=[], leaves=[LeafFacts(url="a", is_leaf_port=False)]), "problem", "for clients"),
    (nats.slow_consumer, broker(2, nats_connections_lost=4), "warning", "broker 2 has lost 4"),
    (disk.file_system, but(FOLDER, file_system="tmpfs"), "problem", "in memory"),
    (disk.file_system, but(FOLDER, file_system="nfs4"), "warning", "network"),
    (disk.file_system, but(FOLDER, file_system="fuse.sshfs"), "warning", "user space"),
    (disk.file_system, but(FOLDER, file_system="overlay"), "warning", "container"),
    (disk.file_system, but(FOLDER, mount_options=["ro"]), "problem", "read-only"),
    (disk.file_system, but(FOLDER, mount_options=["rw", "barrier=0"]), "problem", "power loss"),
    (disk.space, but(FOLDER, free_bytes=1024), "problem", "refused"),
    (disk.space, but(FOLDER, free_bytes=5 * GIB), "warning", "5"),
    (disk.space, but(FOLDER, free_files=3), "warning", "3 more files"),
    (disk.folder, but(FOLDER, mode=0o777), "problem", "every user"),
    (disk.folder, but(FOLDER, links=["/d/streams"]), "problem", "/d/streams is a symbolic link"),
    (disk.folder, but(FOLDER, is_writable=False, owner=7), "problem", "of user 7"),
    (disk.folder, but(FOLDER, broker_id=2), "problem", "belongs to broker 2"),
    (disk.folder, but(FOLDER, problem="it is damaged"), "problem", "damaged"),
    (disk.latency, but(LATENCY, small_ms=[30.0] * 50), "warning", "p50 30.0 ms"),
    (disk.latency, but(LATENCY, small_ms=[1.0] * 49 + [500.0]), "warning", "p99 500.0 ms"),
    (disk.latency, but(LATENCY, large_ms=[2500.0]), "problem", "took 2.5 s"),
    (disk.calls, but(LATENCY, failed={"flock": "not supported"}), "problem", "flock fails"),
    (machine.ntp, but(MACHINE, clock_synchronized=False), "warning", "not synchronised"),
    (machine.brokers_clocks, broker(3, clock_apart_s=-40.0), "warning", "broker 3 differs by at least 40 s"),
    (machine.open_files, limits(files_hard=512), "problem", "512"),
    (machine.open_files, limits(files_hard=2048), "warning", "2,048"),
    (machine.open_files, limits(files_hard=65536, open_files=60000, process=5), "warning", "60,000 are open"),
    (machine.open_files, limits(files_hard=-1), "ok", "none"),
    (machine.memory, limits(memory_bytes=100 * 10**6), "problem", "cgroup"),
    (machine.memory, limits(memory_bytes=400 * 10**6), "warning", "cgroup"),
    (machine.memory, but(MACHINE, available_bytes=10**8), "warning", "available"),
    (machine.processors, but(MACHINE, processors=0.5), "warning", "0.5"),
    (machine.user, limits(user=0), "warning", "root"),
    (machine.port, but(MACHINE, port_problem="Address already in use"), "problem", "already in use"),
    (machine.names, but(MACHINE, names={"log9": "unknown"}), "problem", "log9"),
    (machine.packages, but(MACHINE, missing=["aiohttp"]), "problem", "aiohttp"),
    (machine.kernels, but(MACHINE, kernels_problem="this installation has none"), "warning", "slowly"),
    (cluster.answer, ClusterFacts(servers=["http://u:SECRET@a"], problem="no broker"), "problem", "no broker"),
    (cluster.quorum, members(brokers=alive(1)), "problem", "1 of 3"),
    (cluster.quorum, members(brokers=alive(1, 2)), "warning", "2 of 3"),
    (cluster.quorum, members(brokers=alive(1, 2, voters=2)), "warning", "2 of 2"),
    (cluster.quorum, members(is_current=False), "problem", "3 of 3"),
    (cluster.findings, but(CLUSTER, overview_problem="forbidden"), "not checked", "forbidden"),
    (
        cluster.findings,
        but(CLUSTER, findings=[{"code": "c", "level": "error", "where": "w", "what": "x", "remedy": "r", "count": 1}]),
        "problem",
        "c, w: x",
    ),
    (cluster.reach, broker(2, problem="no answer"), "warning", "broker 2"),
    (cluster.links, broker(1, alive=[1, 2]), "problem", "broker 1 has no link to broker 3"),
    (cluster.versions, broker(1, version="0.1.0"), "warning", "0.1.0 (broker 1)"),
    (cluster.versions, but(CLUSTER, brokers=[BrokerFacts(id=1, url="", version="9")]), "warning", "the brokers are 9"),
    (cluster.feature_level, members(feature_level=1, upgrade_waits=True), "warning", "feature level 1"),
    (cluster.access, but(CLUSTER, has_security=False), "warning", "not enabled"),
    (secrets.files, but(SECRETS, problems={"TLS certificate": "it is no pair"}), "problem", "no pair"),
    (secrets.certificate, but(SECRETS, certificate_expires_s=NOW_S - DAY_S), "problem", "expired 1 days"),
    (secrets.certificate, but(SECRETS, certificate_expires_s=NOW_S + DAY_S), "warning", "1.0 days"),
]


@pytest.mark.parametrize(
    ("find", "facts", "state", "part"), CASES, ids=[f"{case[0].__name__}-{case[2]}-{case[3]}" for case in CASES]
)
def test_each_check_names_what_is_wrong(find: Find, facts: Any, state: State, part: str) -> None:
    found = list(find(facts, HEALTHY))
    assert [one.state for one in found if part in one.found] == [state], found
    assert all(bool(one.remedy) == (one.state in ("problem", "warning")) for one in found if one.state != "not checked")
    assert "SECRET" not in repr(found)


def test_every_check_has_a_case_that_is_not_ok() -> None:
    tried = {case[0] for case in CASES if case[2] != "ok"} | {secrets.administrator}  # above: it depends on settings
    assert {check.find for check in CHECKS} == tried


def test_no_broker_before_the_first_start_is_no_problem() -> None:
    silent = ClusterFacts(servers=["http://a"], problem="no broker")
    new = replace(HEALTHY, folder=but(FOLDER, broker_id=None, exists=False), cluster=silent)
    assert [one.state for one in cluster.answer(silent, new)] == ["not checked"]
    assert [one.state for one in cluster.answer(silent, HEALTHY)] == ["problem"]


def test_missing_facts_are_stated_and_a_disk_that_hangs_is_a_problem() -> None:
    hung = Missing("it did not end within 15 s", is_hung=True)
    report = diagnose(replace(HEALTHY, latency=hung, nats=hung))
    states = {one.check: one.state for one in report.outcomes}
    assert (states["disk.latency"], states["disk.calls"], states["nats.login"]) == (
        "problem",
        "not checked",
        "not checked",
    )
    assert report.problems == 1


def test_check_that_fails_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(facts: Any, examined: Examined) -> Iterator[Outcome]:
        yield from nats.login(NATS, examined)
        raise KeyError("brokers")

    monkeypatch.setattr(doctor, "CHECKS", (Check("nats.login", "nats", fails), *CHECKS[1:]))
    report = diagnose(HEALTHY)
    assert [one.state for one in report.outcomes if one.check == "nats.login"] == ["ok", "not checked"]
    assert report.outcomes[-1].state == "ok"


def test_settings_that_are_wrong_are_a_problem() -> None:
    wrong = Missing("the settings are wrong")
    report = diagnose(replace(HEALTHY, config=None, config_problem="unknown setting", nats=wrong, folder=wrong))
    assert (report.outcomes[0].check, report.outcomes[0].state) == (SETTINGS, "problem")


def test_page_has_every_check() -> None:
    page = OPERATIONS.read_text()
    table = page[page.index("**Checks of `natslog doctor`.**") : page.index("**`natslog support-bundle`**")]
    names = [SETTINGS, *(check.name for check in (*CHECKS, *PRODUCTION))]
    assert re.findall(r"^\| `([a-z_.]+)` \|", table, re.MULTILINE) == names


# ---- production ----

STREAM = {"name": "orders", "replicas": 3, "min_isr": 2, "max_age": "7d"}
READY = but(
    CLUSTER,
    brokers=[but(one, url=one.url.replace("http", "https"), scrapes=99) for one in CLUSTER.brokers],
    streams=[STREAM, {"name": "__activity", "replicas": 1, "min_isr": 1}],
    tokens=[{"identity": "ann", "expires": "2100-01-01T00:00:00Z"}],
)
OWN_DISK = but(FOLDER, mount_point="/data")
MISSING: list[tuple[Find, Any, str]] = [
    (production.brokers, but(READY, cluster={"brokers": [{"id": 1}]}), "1 broker(s)"),
    (production.replicas, but(READY, streams=[STREAM | {"replicas": 1, "min_isr": 1}]), "1 of 1 streams have fewer"),
    (production.replicas, but(READY, streams=[STREAM | {"min_isr": 1}]), "ack what one replica has"),
    (production.retention, but(READY, streams=[STREAM | {"max_age": None}] * 7), "orders and 2 more"),
    (production.tls, but(READY, brokers=CLUSTER.brokers), "http://b1, http://b2, http://b3"),
    (production.tokens, but(READY, has_security=False, tokens=None), "everyone who reaches a broker"),
    (production.tokens, but(READY, tokens=[{"identity": "bob", "expires": None}]), "never expire: bob"),
    (production.tokens, but(READY, tokens=[{"identity": "eve", "expires": "2001-01-01T00:00:00Z"}]), "expired: eve"),
    (production.disk, but(FOLDER, mount_point="/"), "file system of the operating system"),
    (production.disk, but(OWN_DISK, free_bytes=10 * GIB), "10% of the disk is free"),
    (production.alerts, but(READY, brokers=[but(one, scrapes=3) for one in READY.brokers]), "broker(s) 1, 2, 3"),
]


@pytest.mark.parametrize(("find", "facts", "part"), MISSING, ids=[case[2] for case in MISSING])
def test_what_production_lacks_has_a_remedy(find: Find, facts: Any, part: str) -> None:
    found = [one for one in find(facts, HEALTHY) if part in one.found]
    assert [(one.state, bool(one.remedy)) for one in found] == [("warning", True)]


def test_nothing_is_missing_where_all_is_there() -> None:
    config = BrokerConfig(data_dir="/d", nats_url="tls://n1:4222,tls://n2:4222")
    examined = replace(HEALTHY, cluster=READY, folder=OWN_DISK, config=config)
    states = {one.check: one.state for one in diagnose(examined, for_production=True).outcomes}
    assert {name: state for name, state in states.items() if state != "ok"} == {"production.backups": "not checked"}
    assert {check.name for check in PRODUCTION} <= states.keys()
    assert {check.find for check in PRODUCTION} == {case[0] for case in MISSING} | {production.backups}


def test_what_could_not_be_listed_is_not_checked() -> None:
    report = diagnose(replace(HEALTHY, cluster=but(READY, streams=None, tokens=None)), for_production=True)
    states = {one.check: one.state for one in report.outcomes}
    names = ("production.replicas", "production.retention", "production.tokens")
    assert [states[name] for name in names] == ["not checked"] * 3


def test_connection_to_nats_without_tls_is_missing() -> None:
    config = BrokerConfig(data_dir="/d", nats_url="nats://127.0.0.1:4222,nats://n2:4222")
    found = [one.found for one in production.tls(READY, replace(HEALTHY, config=config))]
    assert found == ["messages are not encrypted between the broker and NATS"]


# ---- probes of the data folder ----


def test_latency_probe_measures_and_leaves_nothing(tmp_path: Path) -> None:
    found = folder.probe_latency(tmp_path / "probe")
    assert len(found.small_ms) >= 1
    assert min(found.small_ms) > 0
    assert found.failed == {}
    assert list(tmp_path.iterdir()) == []


def test_latency_probe_that_hangs_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(file: Path) -> LatencyFacts:
        file.write_bytes(b"x")
        (tmp_path.parent / "was-here").touch()
        time.sleep(60)
        raise AssertionError

    monkeypatch.setattr(doctor, "probe_latency", hangs)
    monkeypatch.setattr(doctor, "PROBE_WITHIN_S", 0.5)
    found = doctor._latency(but(FOLDER, measured=str(tmp_path)))
    assert isinstance(found, Missing)
    assert found.is_hung
    assert (tmp_path.parent / "was-here").exists()
    assert list(tmp_path.iterdir()) == []


def test_folder_probe_of_a_folder_that_does_not_exist_creates_nothing(tmp_path: Path) -> None:
    found = folder.probe_folder(str(tmp_path / "a" / "b"))
    assert (found.exists, found.measured, found.process) == (False, str(tmp_path), None)
    assert found.file_system
    assert found.total_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_folder_probe_names_links_and_files(tmp_path: Path) -> None:
    os.symlink("/etc", tmp_path / "streams")
    assert folder.probe_folder(str(tmp_path)).links == [str(tmp_path / "streams")]
    (tmp_path / "file").touch()
    assert "is not a folder" in folder.probe_folder(str(tmp_path / "file")).problem
