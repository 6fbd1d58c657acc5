"""Ids and digests of rows in the JVM are those of the Python sink: both have to give what one golden file contains."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyspark

from pyspark_natslog.jar import jar_path
from tests.conftest import GOLDEN

HERE = Path(__file__).parent
VECTORS = GOLDEN / "row-hashes-v1.json"


def java(program: str, folder: Path, *arguments: str | Path) -> str:
    """What a program of this folder prints, which is compiled into the package of the jar."""
    assert shutil.which("javac"), "a JDK is required, as for the jar"
    path = f"{folder}:{jar_path()}:{Path(pyspark.__file__).parent}/jars/*"
    subprocess.run(["javac", "-cp", path, "-d", folder, HERE / f"{program}.java"], check=True, timeout=120)
    command = ["java", "-cp", path, f"natslog.{program}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_ids_and_digest_in_the_jvm_are_the_golden_ones(tmp_path: Path) -> None:
    golden: dict[str, Any] = json.loads(VECTORS.read_text())
    found = json.loads(java("RowHashVectors", tmp_path, VECTORS))
    assert found == {"digest": golden["digest"], "ids": [one["ids"] for one in golden["ids"]]}
