"""The facts that checks are made of. Sizes are in bytes, times in seconds, unless the name states another unit."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from natslog.config import BrokerConfig
from natslog.wire.probing import LeafFacts, ServerFacts


class Missing(msgspec.Struct, frozen=True):
    """Facts that could not be collected. `is_hung`: the probe did not end in time."""

    why: str
    remedy: str = ""
    is_hung: bool = False


class Limits(msgspec.Struct, kw_only=True):
    """Of a process: that of the running broker (`process`, its number), or of this command (None). `user`: its owner.
    `open_files`: how many it has open, None if that may not be read. `memory_bytes`: of its cgroup.
    """

    process: int | None
    user: int
    files_soft: int
    files_hard: int
    open_files: int | None
    memory_bytes: int | None


class MachineFacts(msgspec.Struct, kw_only=True):
    """`clock_error_s`: the largest error that the kernel states; None if it states nothing. `missing`: packages of
    natslog[broker] that are not installed. `kernels_problem`: why no compiled kernels are used. `port_problem`: why
    the HTTP port cannot be used, `names`: hosts of the settings that are not found, with the reason.
    """

    user: int
    processors: float
    memory_bytes: int
    available_bytes: int
    limits: Limits
    clock_synchronized: bool | None
    clock_error_s: float | None
    python: str
    versions: dict[str, str]
    missing: list[str]
    kernels_problem: str = ""
    port_problem: str = ""
    names: dict[str, str] = {}


class FolderFacts(msgspec.Struct, kw_only=True):
    """The data folder. `measured`: this folder, or the nearest one above it that exists. `process`: that of the broker
    which has it locked. `problem` and `remedy`: why a broker refuses it. `links`: links, pipes and devices in it.
    """

    folder: str
    exists: bool
    measured: str
    file_system: str
    source: str
    mount_options: list[str]
    free_bytes: int
    total_bytes: int
    free_files: int | None
    owner: int
    mode: int
    is_writable: bool
    process: int | None = None
    broker_id: int | None = None
    cluster_id: str = ""
    problem: str = ""
    links: list[str] = []
    mount_point: str = ""


class LatencyFacts(msgspec.Struct, kw_only=True):
    """Of writes that were followed by fdatasync. `failed`: calls that a log needs and that failed, with the reason."""

    small_ms: list[float]
    large_ms: list[float]
    failed: dict[str, str] = {}


class NatsFacts(msgspec.Struct, kw_only=True):
    """`api_problem`: why the JetStream API was not asked for who serves it."""

    servers: list[ServerFacts]
    leaves: list[LeafFacts] = []


class BrokerFacts(msgspec.Struct, kw_only=True):
    """A broker, asked from here. `problem`: why it did not answer. `clock_apart_s`: how much it is ahead of this
    machine at least, 0 within the accuracy of the measurement. `alive`: the brokers to which it has a link.
    `scrapes`: how often `/metrics` was requested since its start.
    """

    id: int
    url: str
    problem: str = ""
    version: str = ""
    clock_apart_s: float = 0.0
    alive: list[int] | None = None
    nats_connections_lost: int | None = None
    scrapes: int | None = None


class ClusterFacts(msgspec.Struct, kw_only=True):
    """`problem`: why no broker answered; the other fields are then empty. `overview_problem`: why the findings are
    missing, for example for lack of a permission. `streams`, `tokens`: only for the checks of production; None if they
    were not listed.
    """

    servers: list[str]
    problem: str = ""
    cluster: dict[str, Any] = {}
    findings: list[dict[str, Any]] = []
    overview_problem: str = ""
    has_security: bool | None = None
    brokers: list[BrokerFacts] = []
    streams: list[dict[str, Any]] | None = None
    tokens: list[dict[str, Any]] | None = None


class SecretFacts(msgspec.Struct, kw_only=True):
    """`problems`: files of secrets that cannot be used, by what they are for. `certificate_expires_s`: of this
    broker's HTTP port; None without TLS. `trusts_other_ca`: whether clients may have certificates of a CA that natslog
    has not made. `used`: how many files were looked at.
    """

    problems: dict[str, str]
    used: int
    certificate_expires_s: float | None = None
    trusts_other_ca: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """All facts, or why they are missing.

    Attributes:
        config: settings of the broker of this machine; None if none were given, or they are wrong (`config_problem`).
        now_s: the wall clock, in seconds since 1970.
    """

    config: BrokerConfig | None
    config_problem: str
    now_s: float
    machine: MachineFacts | Missing
    folder: FolderFacts | Missing
    latency: LatencyFacts | Missing
    nats: NatsFacts | Missing
    cluster: ClusterFacts | Missing
    secrets: SecretFacts | Missing
