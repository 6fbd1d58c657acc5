"""The machine: clocks, limits, the port, names, packages."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from natslog.diagnosis.examined import ClusterFacts, Examined, MachineFacts
from natslog.diagnosis.outcomes import Outcome, ok, problem, warning
from natslog.units import format_size

_APART_S = 5.0
_FILES, _FILES_OF_A_STREAM, _FEWEST_FILES = 4096, 4, 1024
_MEMORY_BYTES, _LEAST_MEMORY_BYTES = 512 * 10**6, 200 * 10**6


def ntp(facts: MachineFacts, examined: Examined) -> Iterator[Outcome]:
    if facts.clock_synchronized is None:
        return
    if facts.clock_synchronized:
        yield ok(f"the kernel's clock is synchronised, error at most {facts.clock_error_s or 0:.3f} s")
    else:
        yield warning(
            "the kernel's clock is not synchronised",
            "Run an NTP client (chrony, systemd-timesyncd). In a virtual machine whose host sets the clock, this may "
            "be without effect.",
        )


def brokers_clocks(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    """Against this machine, as far as the brokers can be reached from it; the findings compare brokers."""
    reached = [one for one in facts.brokers if not one.problem]
    wrong = [one for one in reached if abs(one.clock_apart_s) > _APART_S]
    for one in wrong:
        yield warning(
            f"the clock of broker {one.id} differs by at least {abs(one.clock_apart_s):.0f} s from this machine's",
            "Synchronise the clocks of the machines (NTP). Timestamps and expiry follow the majority of the brokers.",
            broker=one.id,
            apart_s=one.clock_apart_s,
        )
    if reached and not wrong:
        apart_s = max(abs(one.clock_apart_s) for one in reached)
        yield ok(f"{len(reached)} brokers, at most {apart_s:.0f} s apart (accurate to 1 s)")


def open_files(facts: MachineFacts, examined: Examined) -> Iterator[Outcome]:
    limits = facts.limits
    streams = examined.cluster.cluster.get("streams", 0) if isinstance(examined.cluster, ClusterFacts) else 0
    needed = max(_FILES, _FILES_OF_A_STREAM * streams)
    most = limits.files_hard  # the broker raises its limit to this
    whose = "this shell" if limits.process is None else f"the broker (process {limits.process})"
    unlimited = most == resource.RLIM_INFINITY
    found = f"limit of {whose}: {'none' if unlimited else f'{most:,}'}"
    found += "" if limits.open_files is None else f", {limits.open_files:,} are open"
    remedy = f"Set LimitNOFILE=65536 in the unit of the broker (at least {needed:,} for {streams:,} streams)."
    known = {"limit": most, "open": limits.open_files, "process": limits.process}
    if unlimited:
        yield ok(found, **known)
    elif most < _FEWEST_FILES:
        yield problem(found, remedy, **known)
    elif most < needed or (limits.open_files or 0) > 0.8 * most:
        yield warning(found, remedy, **known)
    else:
        yield ok(found, **known)


def memory(facts: MachineFacts, examined: Examined) -> Iterator[Outcome]:
    limit = facts.limits.memory_bytes
    usable = facts.memory_bytes if limit is None else min(limit, facts.memory_bytes)
    found = f"{format_size(facts.memory_bytes)}, {format_size(facts.available_bytes)} available"
    found += "" if limit is None else f"; limit of the cgroup {format_size(limit)}"
    needed = _MEMORY_BYTES
    if examined.config is not None:
        needed += max(0, examined.config.ingest_memory_bytes - 80 * 1024 * 1024)
    remedy = f"Give each broker at least {format_size(needed)}: full load needs more than an idle broker."
    known = {"bytes": facts.memory_bytes, "available_bytes": facts.available_bytes, "cgroup_bytes": limit}
    if usable < _LEAST_MEMORY_BYTES:
        yield problem(found, remedy, **known)
    elif usable < needed or (facts.limits.process is None and facts.available_bytes < needed):
        yield warning(found, remedy, **known)
    else:
        yield ok(found, **known)


def processors(facts: MachineFacts, examined: Examined) -> Iterator[Outcome]:
    found = f"{facts.processors:g} processors"
    if facts.processors < 1:
        yield warning(found, "Give the broker at least one processor: sealing takes up to one.", count=found)
    else:
        yield ok(found, count=facts.processors)


def user(facts: MachineFacts, examined: Examined) -> Iterator[Outcome]:
    if examined.config is None:
        return
    whose = "this command runs" if facts.limits.process is None else "the broker runs"
    if facts.limits.user == 0:
        yield warning(
            f"{whose} as root",
            "Run the broker as a user of its own, and this command as the same user: its results are then those of the "
            "broker.",
        )
    else:
        yield ok(f"{whose} as user {facts.limits.user}")


def port(facts: MachineFacts, examined: Examined) -> Iterator[Outcome]:
    config = examined.config
    if config is None:
        return
    place = f"{config.http_host}:{config.http_port}"
    if facts.limits.process is not None:
        yield ok(f"{place} is for the broker that runs (process {facts.limits.process})")
    elif facts.port_problem:
        yield problem(
            f"a broker could not listen on {place}: {facts.port_problem}",
            "Stop the program that uses the port, or correct http_host and http_port.",
        )
    else:
        yield ok(f"{place} is free")


def names(facts: MachineFacts, examined: Examined) -> Iterator[Outcome]:
    for host, why in facts.names.items():
        yield problem(
            f"the host {host} of advertise_url, seeds or peer_urls is not found: {why}",
            "Correct the setting, or the name service of this machine.",
            host=host,
        )
    if examined.config is not None and not facts.names:
        yield ok("all hosts of the settings are found")


def packages(facts: MachineFacts, examined: Examined) -> Iterator[Outcome]:
    found = f"Python {facts.python}, natslog {facts.versions['natslog']}, pyarrow {facts.versions.get('pyarrow', '?')}"
    known = {"python": facts.python, "versions": facts.versions}
    if facts.missing and examined.config is not None:
        yield problem(
            f"{found}; not installed: {', '.join(facts.missing)}",
            "Install what a broker needs: pip install 'natslog[broker]'",
            **known,
        )
    else:
        yield ok(found, **known)


def kernels(facts: MachineFacts, examined: Examined) -> Iterator[Outcome]:
    if facts.kernels_problem:
        yield warning(
            f"this installation works slowly, because it uses no compiled kernels: {facts.kernels_problem}",
            "Unset NATSLOG_KERNELS_FILE where it is set. Otherwise install a wheel of natslog for this machine; in a "
            "checkout: make install",
        )
    else:
        yield ok("this installation has compiled kernels for this processor")
