"""`natslog doctor`: executes the probes, then all checks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from natslog.client import NatslogClient
from natslog.config import BrokerConfig
from natslog.diagnosis.checks import cluster, disk, machine, nats, production
from natslog.diagnosis.checks import secrets as secret_files
from natslog.diagnosis.examined import (
    ClusterFacts,
    Examined,
    FolderFacts,
    LatencyFacts,
    MachineFacts,
    Missing,
    NatsFacts,
    SecretFacts,
)
from natslog.diagnosis.isolation import Unfinished, isolated
from natslog.diagnosis.outcomes import Outcome, Report, not_checked, ok, problem
from natslog.diagnosis.probes.cluster import probe_cluster, subjects_of_streams
from natslog.diagnosis.probes.folder import probe_folder, probe_latency, remove
from natslog.diagnosis.probes.machine import probe_machine
from natslog.diagnosis.probes.nats import probe_nats
from natslog.diagnosis.probes.secrets import probe_secrets
from natslog.errors import natslog_version
from natslog.times import format_timestamp_us

PROBE_WITHIN_S = 15.0
_REMOVED_WITHIN_S = 2.0
_MOST_SUBJECTS = 200
_HUNG_DISK = "Check the disk, the mount and the kernel log: a broker would stop in the same way."

Facts = TypeVar("Facts", bound=msgspec.Struct)
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """Args: `facts`: the attribute of `Examined` that it gets; without these facts it is not checked. `hung`: what to
    do if their probe did not end, which is a problem then.
    """

    name: str
    facts: str
    find: Callable[[Any, Examined], Iterator[Outcome]]
    hung: str = ""


CHECKS = (
    Check("nats.login", "nats", nats.login),
    Check("nats.version", "nats", nats.version),
    Check("nats.round_trip", "nats", nats.round_trip),
    Check("nats.max_payload", "nats", nats.max_payload),
    Check("nats.permissions", "nats", nats.permissions),
    Check("nats.jetstream", "nats", nats.jetstream),
    Check("nats.certificate", "nats", nats.certificate),
    Check("nats.leafnode", "nats", nats.leafnode),
    Check("nats.slow_consumer", "cluster", nats.slow_consumer),
    Check("disk.file_system", "folder", disk.file_system, _HUNG_DISK),
    Check("disk.space", "folder", disk.space),
    Check("disk.folder", "folder", disk.folder),
    Check("disk.latency", "latency", disk.latency, _HUNG_DISK),
    Check("disk.calls", "latency", disk.calls),
    Check("clock.ntp", "machine", machine.ntp),
    Check("clock.brokers", "cluster", machine.brokers_clocks),
    Check("limits.open_files", "machine", machine.open_files),
    Check("limits.memory", "machine", machine.memory),
    Check("limits.processors", "machine", machine.processors),
    Check("network.port", "machine", machine.port),
    Check("network.names", "machine", machine.names),
    Check("versions.packages", "machine", machine.packages),
    Check("versions.kernels", "machine", machine.kernels),
    Check("versions.brokers", "cluster", cluster.versions),
    Check("versions.feature_level", "cluster", cluster.feature_level),
    Check("cluster.answer", "cluster", cluster.answer),
    Check("cluster.quorum", "cluster", cluster.quorum),
    Check("cluster.findings", "cluster", cluster.findings),
    Check("cluster.reach", "cluster", cluster.reach),
    Check("cluster.links", "cluster", cluster.links),
    Check("security.access", "cluster", cluster.access),
    Check("security.files", "secrets", secret_files.files),
    Check("security.certificate", "secrets", secret_files.certificate),
    Check("security.administrator", "secrets", secret_files.administrator),
    Check("security.user", "machine", machine.user),
)
PRODUCTION = (
    Check("production.brokers", "cluster", production.brokers),
    Check("production.replicas", "cluster", production.replicas),
    Check("production.retention", "cluster", production.retention),
    Check("production.tls", "cluster", production.tls),
    Check("production.tokens", "cluster", production.tokens),
    Check("production.disk", "folder", production.disk),
    Check("production.backups", "cluster", production.backups),
    Check("production.alerts", "cluster", production.alerts),
)
"""In the order in which they are shown. docs/OPERATIONS.md has the same ones; a test compares both."""

SETTINGS = "settings"
"""The name of the check of the settings themselves, which comes before all others."""

_NO_SETTINGS = Missing(
    "no settings of a broker were given", "Give --config, or --data-dir and --nats-url, as to natslog server."
)


def examine(
    config: BrokerConfig | None,
    config_problem: str,
    client: NatslogClient,
    token_file: str | None,
    progress: Progress = lambda what: None,
    *,
    for_production: bool = False,
) -> Examined:
    """Executes the probes; each may fail.

    Args:
        config: settings of the broker of this machine; None if none were given, or they are wrong (`config_problem`).
        progress: called with what is examined next. for_production: for the checks of `PRODUCTION`, too.
    """
    missing = Missing("the settings are wrong") if config_problem else _NO_SETTINGS
    progress("the brokers")
    of_cluster = _probed(lambda: probe_cluster(client, for_production=for_production), ClusterFacts)
    of_folder: FolderFacts | Missing = missing
    of_latency: LatencyFacts | Missing = missing
    of_nats: NatsFacts | Missing = missing
    if config is not None:
        progress("the data folder")
        of_folder = _probed(partial(probe_folder, config.data_dir), FolderFacts)
        progress("the latency of the disk")
        of_latency = _latency(of_folder)
        progress("NATS")
        asks = isinstance(of_cluster, ClusterFacts) and not of_cluster.problem
        of_nats = _probed(
            lambda: probe_nats(config, subjects_of_streams(client, _MOST_SUBJECTS) if asks else []), NatsFacts
        )
    progress("this machine")
    process = of_folder.process if isinstance(of_folder, FolderFacts) else None
    return Examined(
        config=config,
        config_problem=config_problem,
        now_s=time.time(),
        machine=_probed(lambda: probe_machine(config, process), MachineFacts),
        folder=of_folder,
        latency=of_latency,
        nats=of_nats,
        cluster=of_cluster,
        secrets=_probed(lambda: probe_secrets(config, token_file), SecretFacts),
    )


def diagnose(examined: Examined, *, for_production: bool = False) -> Report:
    """All checks. One that fails is reported as not checked."""
    outcomes = _named(SETTINGS, _settings(examined))
    for check in (*CHECKS, *(PRODUCTION if for_production else ())):
        outcomes += _named(check.name, _outcomes(check, examined))
    return Report(
        version=natslog_version(),
        at=format_timestamp_us(int(examined.now_s * 1e6)),
        problems=sum(one.state == "problem" for one in outcomes),
        warnings=sum(one.state == "warning" for one in outcomes),
        outcomes=outcomes,
    )


def _named(check: str, found: Iterable[Outcome]) -> list[Outcome]:
    return [msgspec.structs.replace(one, check=check) for one in found]


def _settings(examined: Examined) -> Iterator[Outcome]:
    if examined.config_problem:
        yield problem(examined.config_problem, "Correct the setting: a broker would not start with it.")
    elif examined.config is None:
        yield not_checked(_NO_SETTINGS.why, _NO_SETTINGS.remedy)
    else:
        yield ok(f"broker {examined.config.broker_id}, data folder {examined.config.data_dir}")


def _outcomes(check: Check, examined: Examined) -> list[Outcome]:
    facts = getattr(examined, check.facts)
    if isinstance(facts, Missing):
        if facts.is_hung and check.hung:
            return [problem(f"the {check.facts} could not be examined: {facts.why}", check.hung)]
        return [not_checked(facts.why, facts.remedy)]
    found: list[Outcome] = []
    try:
        found.extend(check.find(facts, examined))
    except Exception as error:  # a bug, or an answer that no broker gives: the other checks are of use
        found.append(not_checked(f"the check failed: {type(error).__name__}: {error}", "Report this."))
    return found


def _probed(work: Callable[[], Facts], kind: type[Facts]) -> Facts | Missing:
    try:
        return isolated(work, kind, PROBE_WITHIN_S)
    except Unfinished as error:
        return Missing(str(error), is_hung=error.is_hung)


def _latency(facts: FolderFacts | Missing) -> LatencyFacts | Missing:
    if isinstance(facts, Missing):
        return facts
    if not facts.is_writable:
        return Missing(f"this user may not write to {facts.measured}")
    file = Path(facts.measured) / f".natslog-doctor-{secrets.token_hex(8)}"
    try:
        return _probed(lambda: probe_latency(file), LatencyFacts)
    finally:
        _remove(file)


def _remove(file: Path) -> None:
    """Of a probe that was killed; on a disk that hangs, the file stays."""
    try:
        isolated(lambda: remove(file), bool, _REMOVED_WITHIN_S)
    except Unfinished:
        return
