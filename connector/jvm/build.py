"""Compiles the columnar reader and the sink for Spark against the jars of an installed PySpark, into one jar.

    python connector/jvm/build.py [--target FILE]

Does nothing if the jar is newer than its sources. Needs a JDK (`javac`, by JAVA_HOME or PATH); without one it says so,
and how to get one: the Python source works without the jar.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
TARGET = HERE.parent / "pyspark_natslog" / "jars" / "natslog-spark.jar"
JAVA_RELEASE = "17"
_MADE_AT = "2026-01-01T00:00:00Z"  # of the files in the jar, so that the same sources give the same bytes


def tool(name: str) -> str | None:
    """The path of a program of the JDK; None where there is no JDK."""
    home = os.environ.get("JAVA_HOME")
    return shutil.which(name, path=f"{home}/bin") if home else shutil.which(name)


def sources() -> list[Path]:
    return sorted((HERE / "src").rglob("*.java"))


def is_current(target: Path) -> bool:
    newest = max(path.stat().st_mtime for path in [*sources(), Path(__file__)])
    return target.is_file() and target.stat().st_mtime > newest


def spark_jars() -> Path:
    """The folder of the installed PySpark. Raises SystemExit."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise SystemExit("natslog: the jar is compiled against PySpark, which is not installed: pip install pyspark")
    return Path(spec.origin).parent / "jars"


def build(target: Path) -> None:
    """Raises SystemExit: it cannot be compiled."""
    javac, jar = tool("javac"), tool("jar")
    assert javac is not None, "the caller has looked"
    assert jar is not None
    with tempfile.TemporaryDirectory() as folder:
        classes, made = Path(folder, "classes"), Path(folder, target.name)
        lint = ["-Xlint:all,-path,-classfile,-serial,-deprecation", "-Werror"]
        _run(
            [javac, "--release", JAVA_RELEASE, *lint, "-cp", f"{spark_jars()}/*", "-d", classes, *sources()],
            "the columnar reader for Spark",
        )
        _run([jar, "--create", "--date", _MADE_AT, "--file", made, "-C", classes, "."], "its jar")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, target)


def _run(command: Sequence[str | Path], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"natslog: {what} cannot be built:\n{done.stdout}{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET, help="the jar")
    target = parser.parse_args().target
    if is_current(target):
        return
    if tool("javac") is None or tool("jar") is None:
        print(
            "natslog: no JDK was found, so the columnar reader for Spark was not built (the Python source works "
            "without it). To build it, install a JDK (Debian: apt-get install openjdk-17-jdk-headless), then: make jar",
            file=sys.stderr,
        )
        return
    build(target)
    print(f"built {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}")


if __name__ == "__main__":
    main()
