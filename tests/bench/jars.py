"""Java packages of Maven Central, resolved with their dependencies by Ivy, which pyspark brings along."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pyspark

CACHE = Path.home() / ".cache" / "natslog-bench"
_SPARK_JARS = Path(pyspark.__file__).parent / "jars"
_RESOLVE_WITHIN_S = 600


def java() -> str:
    """The Java that Spark uses: that of `JAVA_HOME`, else of `PATH`."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else "java"


def resolve(organisation: str, module: str, revision: str) -> list[Path]:
    """The package's jar and those of its dependencies, from the user's cache or downloaded into it.

    Args:
        revision: a version, or a range of versions as Ivy writes it (`[4.0,4.3.0]`: the newest one of these).

    Raises:
        RuntimeError: they cannot be had, with the remedy.
    """
    listing = CACHE / f"{module}-{re.sub(r'[^0-9A-Za-z.]+', '_', revision)}.classpath"
    if not (found := _listed(listing)):
        _download(organisation, module, revision, listing)
        found = _listed(listing)
    return found


def _listed(listing: Path) -> list[Path]:
    """Empty where a jar of the list, or the list, is missing."""
    if not listing.exists():
        return []
    found = [Path(text) for text in listing.read_text().strip().split(os.pathsep)]
    return found if all(path.exists() for path in found) else []


def _download(organisation: str, module: str, revision: str, listing: Path) -> None:
    ivy = next(_SPARK_JARS.glob("ivy-*.jar"), None)
    if ivy is None:
        raise RuntimeError(f"no Ivy in {_SPARK_JARS}: install pyspark from PyPI, whose package contains it")
    CACHE.mkdir(parents=True, exist_ok=True)
    unfinished = listing.with_suffix(".unfinished")
    command = [java(), "-jar", str(ivy), "-cache", str(CACHE / "ivy"), "-types", "jar", "bundle", "-confs", "default"]
    command += ["-dependency", organisation, module, revision, "-cachepath", str(unfinished), "-warn"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_RESOLVE_WITHIN_S)
    if done.returncode or not unfinished.exists():
        raise RuntimeError(
            f"{organisation}:{module}:{revision} could not be downloaded from Maven Central; check that this machine "
            f"reaches it, and that the version exists. Ivy printed: {(done.stdout + done.stderr)[-2000:]}"
        )
    unfinished.rename(listing)


def without_those_of_spark(jars: list[Path]) -> list[Path]:
    """The jars of which Spark has none of the same module in any version: a second one would be loaded beside it."""
    return without(jars, [path.name for path in _SPARK_JARS.glob("*.jar")])


def without(jars: list[Path], present: list[str]) -> list[Path]:
    """The jars of modules of which no file of `present` is a version. Names of modules may contain `-` and digits."""
    return [jar for jar in jars if not any(re.match(re.escape(module_of(jar)) + r"-\d", name) for name in present)]


def module_of(jar: Path) -> str:
    """By the layout of Ivy's cache: `ORGANISATION/MODULE/jars/MODULE-VERSION.jar`."""
    return jar.parent.parent.name


def version_of(jar: Path) -> str:
    return jar.stem.removeprefix(f"{module_of(jar)}-")
