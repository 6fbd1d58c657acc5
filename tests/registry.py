"""A real schema registry: Apicurio, of Maven Central, by the Ivy that pyspark contains. It keeps schemas in memory."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark

from natslog.nats_server import end_with_parent, free_port
from tests.bench.jars import CACHE, java
from tests.harness import eventually

_VERSION = "2.6.13.Final"
_MODULE = "apicurio-registry-app"
_STARTS_WITHIN_S = 120.0
_DOWNLOAD_WITHIN_S = 600.0
_IVY = f"""<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
  <info organisation="natslog" module="registry"/>
  <dependencies>
    <dependency org="io.apicurio" name="{_MODULE}" rev="{_VERSION}" transitive="false">
      <artifact name="{_MODULE}" type="tar.gz" ext="tar.gz" m:classifier="all"/>
    </dependency>
  </dependencies>
</ivy-module>
"""


class Registry:
    """`url`: of the API that Confluent's registry has, too."""

    def __init__(self, url: str) -> None:
        self.url = url

    def register(self, subject: str, schema: Any) -> int:
        """The schema's id."""
        body = json.dumps({"schema": json.dumps(schema)}).encode()
        kind = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
        request = urllib.request.Request(f"{self.url}/subjects/{subject}/versions", body, kind)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(json.load(answer)["id"])


@contextmanager
def running_registry(folder: Path) -> Iterator[Registry]:
    """Until the end of the block."""
    port = free_port()
    options = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx512m", "-jar", str(_program())]
    variables = {"QUARKUS_HTTP_PORT": str(port), "QUARKUS_HTTP_HOST": "127.0.0.1", "HTTP_PORT": str(port)}
    with open(folder / "registry.log", "wb") as log:
        process = subprocess.Popen(
            [java(), *options],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=end_with_parent,
        )
    try:
        registry = Registry(f"http://127.0.0.1:{port}/apis/ccompat/v7")

        def answers() -> bool:
            assert process.poll() is None, (folder / "registry.log").read_text()[-2000:]
            try:
                with urllib.request.urlopen(f"{registry.url}/subjects", timeout=5) as answer:
                    return bool(answer.status == 200)
            except (urllib.error.URLError, OSError):
                return False

        eventually(answers, _STARTS_WITHIN_S, "the registry answers")
        yield registry
    finally:
        process.kill()
        process.wait()


def _program() -> Path:
    """Its jar, in the user's cache or downloaded into it."""
    place = CACHE / f"{_MODULE}-{_VERSION}"
    program = place / f"{_MODULE}-{_VERSION}-runner.jar"
    if not program.exists():
        place.mkdir(parents=True, exist_ok=True)
        (place / "ivy.xml").write_text(_IVY)
        ivy = next((Path(pyspark.__file__).parent / "jars").glob("ivy-*.jar"))
        pattern = f"{place}/[artifact]-[revision].[ext]"
        command = [java(), "-jar", str(ivy), "-cache", str(CACHE / "ivy"), "-ivy", str(place / "ivy.xml")]
        command += ["-types", "tar.gz", "-retrieve", pattern, "-warn"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DOWNLOAD_WITHIN_S)
        archives = list(place.glob("*.tar.gz"))
        assert archives, f"Apicurio could not be downloaded from Maven Central: {(done.stdout + done.stderr)[-1000:]}"
        with tarfile.open(archives[0]) as archive:
            archive.extractall(place, filter="data")
        archives[0].unlink()
    return program
