"""The parts of the archive, each from what answers; what does not is named in the manifest."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from natslog.client import NatslogClient
from natslog.config import BrokerConfig
from natslog.diagnosis.bundle import allowed
from natslog.diagnosis.bundle.allowed import kept
from natslog.diagnosis.bundle.archive import Part
from natslog.diagnosis.bundle.lines import folder_lines, folder_text, log_lines, metric_lines, newest_bytes
from natslog.diagnosis.bundle.redaction import Redactor
from natslog.diagnosis.examined import Examined, FolderFacts, Missing
from natslog.diagnosis.isolation import Unfinished, isolated
from natslog.diagnosis.outcomes import Report
from natslog.diagnosis.probes.cluster import ANSWER_WITHIN_S, MOST_BROKERS, hurried
from natslog.diagnosis.probes.machine import package_versions
from natslog.errors import NatslogError, natslog_version

MOST_PART_BYTES = 8 * 1024 * 1024
MOST_BYTES = 64 * 1024 * 1024
MOST_EVENTS = 2_000
_WITHIN_S = 20.0
_ACTIVITY = "__activity"
_PROC = ("limits", "status", "io")
_OF_MACHINE = ("loadavg", "meminfo", "pressure/cpu", "pressure/io", "pressure/memory", "version")
_MOST_PROC_BYTES = 16 * 1024
_LEFT_OUT = [
    "messages: payloads, keys, headers",
    "secrets: tokens, passwords, keys, certificates, the cluster secret, variables of the environment",
    "bodies, paths and addresses of requests, and the audit log",
    "settings of brokers on other machines: run natslog support-bundle there as well",
]

Result = TypeVar("Result")
Json = dict[str, Any]


@dataclass(slots=True)
class _Collected:
    """Parts, and those that are missing, by name."""

    redactor: Redactor
    parts: list[Part] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    size_bytes: int = 0

    def add_json(self, name: str, what: str, value: Any) -> None:
        data = msgspec.json.format(msgspec.json.encode(value), indent=1)
        if len(data) > MOST_PART_BYTES:
            self.missing[name] = f"it has {len(data):,} bytes; at most {MOST_PART_BYTES:,} are included"
        else:
            self._add(name, what, data.decode())

    def add_text(self, name: str, what: str, text: str) -> None:
        if len(text) > MOST_PART_BYTES:
            text = text[: text.rindex("\n", 0, MOST_PART_BYTES)] + "\n(cut here)\n"
        self._add(name, what, text)

    def _add(self, name: str, what: str, text: str) -> None:
        data = self.redactor.without_known(text).encode(errors="replace")
        if self.size_bytes + len(data) > MOST_BYTES:
            self.missing[name] = f"the archive has its maximum of {MOST_BYTES:,} bytes"
            return
        self.size_bytes += len(data)
        self.parts.append(Part(name, what, data))

    def fetched(self, name: str, work: Callable[[], Result], kind: type[Result]) -> Result | None:
        """None: it is missing, and why is noted."""
        try:
            return isolated(work, kind, _WITHIN_S)
        except Unfinished as error:
            self.missing[name] = self.redactor.text(str(error))
            return None


def make_parts(
    examined: Examined,
    report: Report,
    client: NatslogClient,
    logs: Iterable[str],
    redactor: Redactor,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[list[Part], dict[str, str]]:
    """The files of the archive, the manifest first; and what is missing, with the reason.

    Args:
        logs: paths of log files of brokers and of NATS servers.
    """
    collected = _Collected(redactor)
    progress("streams")
    _add_streams(collected, client)
    progress("the cluster")
    _add_cluster(collected, client)
    progress("this machine")
    _add_machine(collected, examined)
    _add_settings(collected, examined)
    collected.add_json("doctor.json", "result of natslog doctor", _texts(msgspec.to_builtins(report), redactor))
    for number, path in enumerate(logs, start=1):
        name = f"logs/{number}.log"
        data = collected.fetched(name, partial(newest_bytes, path), bytes)
        if data is not None:
            what = "the newest 2 MiB of a log: lines of natslog and of the NATS server"
            collected.add_text(name, what, log_lines(data, redactor))
    return [_manifest(collected, report), *collected.parts], collected.missing


def _manifest(collected: _Collected, report: Report) -> Part:
    body = {
        "natslog": natslog_version(),
        "created": report.at,
        "hashed_names": collected.redactor.hashes_names,
        "files": [
            {"name": one.name, "bytes": len(one.data), "sha256": one.digest, "what": one.what}
            for one in collected.parts
        ],
        "missing": [{"name": name, "why": why} for name, why in collected.missing.items()],
        "left_out": _LEFT_OUT,
    }
    return Part("manifest.json", "this list", msgspec.json.format(msgspec.json.encode(body), indent=1))


# ---- from brokers ----


def _add_streams(collected: _Collected, client: NatslogClient) -> None:
    """Comes first: names in texts are recognised by it."""
    found = collected.fetched("streams.json", lambda: hurried(client).streams(internal=True), list[Json])
    if found is None:
        return
    for one in found:
        names = [one.get("name"), one.get("group"), *_list(one.get("subjects")), *_list(one.get("former_subjects"))]
        collected.redactor.add_names(name for name in names if isinstance(name, str) and not name.startswith("__"))
    shown = kept(found, [allowed.STREAM], collected.redactor)
    collected.add_json("streams.json", f"settings and positions of streams, at most {allowed.MOST_ITEMS:,}", shown)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _add_cluster(collected: _Collected, client: NatslogClient) -> None:
    calls: tuple[tuple[str, str, Callable[[], Json], allowed.Shape], ...] = (
        ("overview.json", "what is wrong, each broker, and all streams", hurried(client).overview, allowed.OVERVIEW),
        ("history.json", "the last hour of each broker", hurried(client).history, allowed.HISTORY),
    )
    for name, what, call, shape in calls:
        if (found := collected.fetched(name, call, Json)) is not None:
            collected.add_json(name, what, kept(found, shape, collected.redactor))
    events = collected.fetched("activity.jsonl", partial(_events, client), list[Json])
    if events is not None:
        lines = [json.dumps(kept(one, allowed.ACTIVITY, collected.redactor)) for one in events]
        what = f"the newest {MOST_EVENTS:,} events, without what was requested"
        collected.add_text("activity.jsonl", what, "\n".join(lines) + "\n")
    found = collected.fetched("cluster.json", hurried(client).cluster, Json)
    if found is not None:
        collected.add_json("cluster.json", "the brokers", kept(found, allowed.CLUSTER, collected.redactor))
        for number, url in _members(found):
            _add_broker(collected, client, number, url)


def _members(cluster: Json) -> list[tuple[int, str]]:
    members = [(one.get("id"), one.get("url")) for one in _list(cluster.get("brokers")) if isinstance(one, dict)]
    return [(number, url) for number, url in members if type(number) is int and isinstance(url, str)][:MOST_BROKERS]


def _add_broker(collected: _Collected, client: NatslogClient, number: int, url: str) -> None:
    folder, redactor = f"brokers/{number}", collected.redactor
    for name, path, what, shape in (
        ("readyz.json", "/readyz", "whether this broker is ready", allowed.READY),
        ("cluster.json", "/v1/cluster", "the cluster as this broker sees it", allowed.CLUSTER),
    ):
        answer = collected.fetched(f"{folder}/{name}", partial(_answer, client, url, path), bytes)
        if answer is not None:
            try:
                decoded = json.loads(answer)
            except (ValueError, RecursionError):
                collected.missing[f"{folder}/{name}"] = "the answer is not JSON"
                continue
            collected.add_json(f"{folder}/{name}", what, kept(decoded, shape, redactor))
    metrics = collected.fetched(f"{folder}/metrics.txt", partial(_answer, client, url, "/metrics"), bytes)
    if metrics is not None:
        text = metric_lines(metrics.decode(errors="replace"), redactor)
        collected.add_text(f"{folder}/metrics.txt", "metrics of this broker", text)


def _answer(client: NatslogClient, url: str, path: str) -> bytes:
    """Raises NatslogError: there is none."""
    answer = hurried(client).answer_of(url, path, ANSWER_WITHIN_S)
    if answer is None or answer.status not in (200, 503):
        raise NatslogError("no answer" if answer is None else f"HTTP {answer.status}")
    return answer.data


def _events(client: NatslogClient) -> list[Json]:
    with hurried(client) as asker:
        position = asker.position(_ACTIVITY)
        end = position["high_watermark"]
        start = max(position["log_start_offset"], end - MOST_EVENTS)
        batches = asker.read(_ACTIVITY, start, end, columns=["value"])
        return [json.loads(value) for batch in batches for value in batch.column("value").to_pylist()]


# ---- from this machine ----


def _add_settings(collected: _Collected, examined: Examined) -> None:
    if examined.config is None:
        collected.missing["settings.json"] = examined.config_problem or "no settings of a broker were given"
        return
    shown = kept(msgspec.to_builtins(examined.config), allowed.SETTINGS, collected.redactor)
    collected.add_json(
        "settings.json", "settings of the broker of this machine; of files only whether they are set", shown
    )


def _add_machine(collected: _Collected, examined: Examined) -> None:
    redactor = collected.redactor
    versions = {"python": platform.python_version(), "platform": platform.platform(), **package_versions()}
    collected.add_json("versions.json", "versions of Python, natslog and what it uses", versions)
    facts = {
        name: {"missing": found.why} if isinstance(found, Missing) else msgspec.to_builtins(found)
        for name in ("machine", "folder", "latency", "nats")
        for found in [getattr(examined, name)]
    }
    collected.add_json("facts.json", "what natslog doctor has measured", _texts(facts, redactor))
    process = examined.folder.process if isinstance(examined.folder, FolderFacts) else None
    of_process = "self" if process is None else str(process)
    files = [*(f"/proc/{of_process}/{name}" for name in _PROC), *(f"/proc/{name}" for name in _OF_MACHINE)]
    whose = "this command" if process is None else "the broker"
    text = collected.fetched("proc.txt", partial(_proc, files), str)
    if text is not None:
        collected.add_text("proc.txt", f"/proc: limits and state of {whose}, load and memory of the machine", text)
    if examined.config is not None:
        listed = collected.fetched("data-folder.txt", partial(folder_lines, examined.config.data_dir), list[str])
        if listed is not None:
            text = folder_text(listed, redactor)
            collected.add_text("data-folder.txt", "size, mode and name of the files in the data folder", text)


def _proc(files: list[str]) -> str:
    shown = []
    for path in files:
        try:
            with open(path, "rb") as file:
                text = file.read(_MOST_PROC_BYTES).decode(errors="replace")
        except OSError as error:
            text = f"({os.strerror(error.errno or 0)})\n"
        shown.append(f"==> {re.sub('^/proc/[0-9]+', '/proc/PROCESS', path)}\n{text}")
    return "\n".join(shown)


def _texts(value: Any, redactor: Redactor) -> Any:
    """Facts of natslog itself: the texts in them are for people."""
    match value:
        case str():
            return redactor.text(value)
        case dict():
            return {redactor.text(key): _texts(one, redactor) for key, one in value.items()}
        case list():
            return [_texts(one, redactor) for one in value]
    return value


def redactor_for(config: BrokerConfig | None, client: NatslogClient, *, hashes_names: bool) -> Redactor:
    from natslog.diagnosis.bundle.known_secrets import known_secrets

    return Redactor(known_secrets(config, client.options, os.environ), hashes_names=hashes_names)
