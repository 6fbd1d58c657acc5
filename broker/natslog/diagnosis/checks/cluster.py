"""The cluster: who answers, versions, majority, findings of the brokers, connections between them."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from natslog.config import is_loopback
from natslog.diagnosis.examined import ClusterFacts, Examined, FolderFacts, MachineFacts
from natslog.diagnosis.outcomes import Outcome, not_checked, ok, problem, warning
from natslog.urls import without_secrets


def answer(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    servers = ", ".join(map(without_secrets, facts.servers))
    if not facts.problem:
        found = f"{servers}: natslog {facts.cluster.get('version')}, cluster {facts.cluster.get('cluster_id')}"
        yield ok(found)
        return
    is_first_start = examined.config is not None and not (
        isinstance(examined.folder, FolderFacts) and examined.folder.broker_id is not None
    )
    if is_first_start:
        yield not_checked(f"no broker answers at {servers}: none was started with this data folder")
    else:
        yield problem(
            facts.problem,
            "Start the broker, give the right --server and its credentials, or look at the log of the broker.",
        )


def quorum(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    voters = [one for one in facts.cluster.get("brokers", []) if one["role"] == "voter"]
    if not voters:
        return
    alive, needed = sum(one["alive"] for one in voters), len(voters) // 2 + 1
    found = f"{alive} of {len(voters)} voters are up, {needed} are needed"
    known = {"alive": alive, "voters": len(voters), "needed": needed}
    if alive < needed or not facts.cluster.get("is_current"):
        yield problem(found, "Start the missing brokers: no change is possible without them.", **known)
    elif len(voters) == 2:
        yield warning(found, "Add a third broker: with two, the failure of either stops all changes.", **known)
    elif alive == needed and len(voters) > 1:
        yield warning(found, "Start the missing brokers: the cluster survives no other failure.", **known)
    else:
        yield ok(found, **known)


def findings(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    if facts.problem:
        return
    if facts.overview_problem:
        yield not_checked(facts.overview_problem, "Give a token that has the action monitor.")
        return
    for one in facts.findings:
        make = problem if one["level"] == "error" else warning
        found = f"{one['code']}, {one['where']}: {one['what']}"
        yield make(found, one["remedy"], **{key: one[key] for key in ("code", "where", "count")})
    if not facts.findings:
        yield ok("the brokers report nothing that is wrong")


def reach(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    """From here. A broker that is down is a finding of the others."""
    alive = {one["id"] for one in facts.cluster.get("brokers", []) if one["alive"]}
    unreached = [one for one in facts.brokers if one.problem and one.id in alive]
    for one in unreached:
        yield warning(
            f"broker {one.id} at {one.url} is up, and cannot be reached from this machine: {one.problem}",
            "Clients on this machine need each broker: check its advertise_url, firewalls and the name service.",
            broker=one.id,
        )
    if facts.brokers and not unreached:
        count = sum(not one.problem for one in facts.brokers)
        yield ok(f"{count} of {len(facts.brokers)} brokers can be reached from this machine")


def links(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    """As each broker states it: the findings are those of one."""
    stated = {one.id: set(one.alive) for one in facts.brokers if one.alive is not None}
    cut = [(one, other) for one in stated for other in stated if other not in stated[one]]
    for one, other in cut:
        yield problem(
            f"broker {one} has no link to broker {other}, though both answer",
            f"Check the network from broker {one} to broker {other}: addresses, firewalls, secrets and certificates.",
            broker=one,
            to=other,
        )
    if len(stated) > 1 and not cut:
        yield ok(f"{len(stated)} brokers are connected with each other")


def versions(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    of_brokers = {one.id: one.version for one in facts.brokers if one.version}
    if not of_brokers:
        return
    here = examined.machine.versions["natslog"] if isinstance(examined.machine, MachineFacts) else None
    shown = ", ".join(f"{version} (broker {number})" for number, version in of_brokers.items())
    known = {"brokers": {str(number): version for number, version in of_brokers.items()}, "here": here}
    if len(set(of_brokers.values())) > 1:
        yield warning(f"the brokers run different versions: {shown}", "Complete the upgrade.", **known)
    elif here is not None and here not in of_brokers.values():
        yield warning(
            f"this command is natslog {here}, the brokers are {next(iter(of_brokers.values()))}",
            "Install the version of the brokers here.",
            **known,
        )
    else:
        yield ok(f"all brokers that answer run natslog {next(iter(of_brokers.values()))}", **known)


def feature_level(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    cluster = facts.cluster
    if "feature_level" not in cluster:
        return
    found = f"feature level {cluster['feature_level']}, supported by all brokers: {cluster['supported_level']}"
    if cluster.get("upgrade_waits"):
        waits = cluster.get("upgrade_waits_for") or []
        remedy = (
            f"Start or upgrade the brokers {', '.join(map(str, waits))}, then run natslog cluster finalize-upgrade."
            if waits
            else "When the new version is evaluated: natslog cluster finalize-upgrade. It cannot be undone."
        )
        yield warning(found, remedy, level=cluster["feature_level"])
    else:
        yield ok(found, level=cluster["feature_level"])


def access(facts: ClusterFacts, examined: Examined) -> Iterator[Outcome]:
    """Whether everyone on the network may use the brokers."""
    config = examined.config
    hosts = [urlsplit(one.url).hostname or "" for one in facts.brokers]
    is_open = facts.has_security is False and any(not is_loopback(host) for host in hosts)
    listens = config is not None and config.insecure and not config.security and not is_loopback(config.http_host)
    if is_open or listens:
        yield warning(
            "security is not enabled, and the brokers can be reached from other machines",
            "Set security = true (see SECURITY.md), or make sure that everyone in that network may read and change "
            "all streams.",
        )
    elif facts.has_security:
        yield ok("by tokens and client certificates")
    elif config is not None or facts.brokers:
        security = config is not None and config.security
        yield ok("by tokens and client certificates" if security else "from this machine only")
