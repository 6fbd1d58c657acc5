"""The limit of the columnar reader: the responses of brokers as files, read by the same code (`java/natslog`)."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

import pyspark

from natslog.client import NatslogClient
from pyspark_natslog.jar import jar_path

_SOURCES = Path(__file__).parent / "java"
_ANSWER_BYTES = 32 * 1024 * 1024  # as the reader asks for
_WHOLE = {"Natslog-Batches": "whole", "Natslog-Columns": "whole"}
SOURCE = "natslog.MappedSource"


def mapped_jar(folder: Path) -> Path:
    """The jar with `natslog.MappedSource`, compiled beside the reader's. Raises CalledProcessError."""
    jar, classes = folder / "mapped.jar", folder / "classes"
    path = f"{Path(pyspark.__file__).parent}/jars/*:{jar_path()}"
    sources = list(map(str, _SOURCES.rglob("*.java")))
    subprocess.run(["javac", "--release", "17", "-cp", path, "-d", str(classes), *sources], check=True)
    subprocess.run(["jar", "--create", "--file", str(jar), "-C", str(classes), "."], check=True)
    return jar


def write_answers(client: NatslogClient, url: str, stream: str, columns: Sequence[str], folder: Path) -> None:
    """The responses to a scan of these columns of the whole stream, a file each."""
    folder.mkdir()
    info = client.position(stream)
    start, end, number = int(info["log_start_offset"]), int(info["high_watermark"]), 0
    while start < end:
        query = {"start": start, "end": end, "columns": ",".join(columns), "max_bytes": _ANSWER_BYTES}
        request = urllib.request.Request(f"{url}/v1/streams/{stream}/messages?{urlencode(query)}", headers=_WHOLE)
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["Natslog-Batches"] == "columns", "the columns as they are stored"
            (folder / f"{number:06}").write_bytes(answer.read())
            start, number = int(answer.headers["Natslog-Next-Offset"]), number + 1
