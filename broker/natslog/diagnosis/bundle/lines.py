"""Texts of lines: metrics, logs, and the files of a data folder."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from natslog.diagnosis.bundle.allowed import LOG_LINE, kept
from natslog.diagnosis.bundle.redaction import Redactor
from natslog.log_events import AUDIT_LOGGER

MOST_LOG_BYTES = 2 * 1024 * 1024
MOST_METRIC_LINES = 100_000
MOST_FILES = 20_000
_MOST_LINE_CHARS = 4_000
_MOST_TRACE_CHARS = 50_000
_METRIC = re.compile(r"(natslog_[a-z0-9_]+|process_[a-z0-9_]+)(?:\{(.*)\})? ([0-9.eE+-]+|NaN|[+-]Inf)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_WORDS = re.compile(r"[\w{}/.:+-]{0,100}")
_NAMES = frozenset({"stream", "consumer"})
_OF_BROKER = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+(?:[+-]\d{4})? (?:DEBUG|INFO|WARNING|ERROR|CRITICAL) +(natslog[\w.]*|asyncio): "
)
_OF_NATS_SERVER = re.compile(r"\[\d+\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+ \[(?:INF|WRN|ERR|FTL|DBG)\] ")
_FRAME = re.compile(r' *File "[^"]*[/\\]((?:natslog|asyncio|aiohttp|nats)[/\\][\w/\\.]+)", (line \d+, in [\w<>]+)')


def metric_lines(text: str, redactor: Redactor) -> str:
    """The samples of natslog's own metrics, and of its process; without the texts that explain them."""
    shown = []
    for line in text.splitlines()[:MOST_METRIC_LINES]:
        if (found := _METRIC.fullmatch(line)) is None:
            continue
        labels = [
            f'{label}="{redactor.name(value) if label in _NAMES else redactor.without_secrets(value)}"'
            for label, value in _LABEL.findall(found[2] or "")
            if label in _NAMES or _WORDS.fullmatch(value)
        ]
        shown.append(f"{found[1]}{{{','.join(labels)}}} {found[3]}" if labels else f"{found[1]} {found[3]}")
    return "\n".join(shown) + "\n"


# ---- logs ----


def newest_bytes(path: str) -> bytes:
    """The end of a log, from the begin of a line on. Raises OSError."""
    with open(path, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it is not a file")
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - MOST_LOG_BYTES))
        data = file.read(MOST_LOG_BYTES)
    return data if size_bytes <= MOST_LOG_BYTES else data.partition(b"\n")[2]


def log_lines(data: bytes, redactor: Redactor) -> str:
    """The lines of natslog and of the NATS server, and the places in tracebacks; not the audit log."""
    shown, left_out = [], 0
    for line in data.decode(errors="replace").splitlines():
        if (kept := _log_line(line, redactor)) is None:
            left_out += bool(line.strip())
        else:
            shown.append(kept)
    return "\n".join([*shown, f"({left_out} lines of other forms, and of the audit log, were left out)"]) + "\n"


def _log_line(line: str, redactor: Redactor) -> str | None:
    if line.startswith("{"):
        return _json_line(line, redactor)
    line = line[:_MOST_LINE_CHARS]
    if (found := _OF_BROKER.match(line) or _OF_NATS_SERVER.match(line)) is not None:
        if found.lastindex and found[1].startswith(AUDIT_LOGGER):
            return None
        return found[0] + redactor.text(line[found.end() :])
    if (frame := _FRAME.match(line)) is not None:
        return f"  {frame[1]}, {frame[2]}"
    return line if line.strip() == "Traceback (most recent call last):" else None


def _json_line(line: str, redactor: Redactor) -> str | None:
    """Of a log in the format JSON."""
    try:
        decoded = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(decoded, dict) or not str(decoded.get("logger")).startswith(("natslog", "asyncio")):
        return None
    if decoded["logger"].startswith(AUDIT_LOGGER):
        return None
    shown = kept(decoded, LOG_LINE, redactor)
    frames = [_FRAME.match(one) for one in str(decoded.get("error", ""))[:_MOST_TRACE_CHARS].splitlines()]
    if places := [f"{frame[1]}, {frame[2]}" for frame in frames if frame is not None]:
        shown["error"] = places
    return json.dumps(shown)


# ---- the data folder ----


def folder_lines(folder: str) -> list[str]:
    """Size, mode and path of each file, in order; the first `MOST_FILES`. Symbolic links are not followed."""
    found = []
    for status, path in _files(Path(folder), ""):
        found.append(f"{status.st_size:>14} {stat.filemode(status.st_mode)} {path}")
        if len(found) == MOST_FILES:
            found.append(f"(only the first {MOST_FILES:,} files)")
            break
    return found


def _files(folder: Path, path: str) -> Iterator[tuple[os.stat_result, str]]:
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda one: one.name)
    for entry in listed:
        here = f"{path}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield entry.stat(follow_symlinks=False), f"{here}/"
            yield from _files(Path(entry.path), f"{here}/")
        else:
            yield entry.stat(follow_symlinks=False), here


_KNOWN_PATH = re.compile(
    r"[0-9a-f.]{8,80}|[0-9]{20}[\w.-]*|streams|raft|staged|lock|broker|clock|life|newest|companion|log-start|"
    r"hw-checkpoint|leader-epochs|hard-state|pulse|reserve|scrub|wal-[0-9a-f]+|producers|removed|erasures|meta[\w.-]*"
)


def folder_text(lines: list[str], redactor: Redactor) -> str:
    """With the names of streams as they are in the rest of the archive."""
    return "\n".join(_folder_line(line, redactor) for line in lines) + "\n"


def _folder_line(line: str, redactor: Redactor) -> str:
    if line.startswith("("):
        return line
    facts, path = line[:26], line[26:]
    parts = path.split("/")
    shown = []
    for at, part in enumerate(parts):
        name, dot, rest = part.partition(".removed") if part.endswith(".removed") else (part, "", "")
        before, separator, stream_id = name.rpartition(".")
        if at == 1 and parts[0] == "streams" and separator and re.fullmatch(r"[0-9a-f]{32}", stream_id):
            shown.append(f"{redactor.name(before)}.{stream_id}{dot}{rest}")
        else:
            shown.append(part if not part or _KNOWN_PATH.fullmatch(part) else redactor.name(_printable(part)))
    return facts + "/".join(shown)


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in text)
