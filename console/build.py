"""Copies the libraries of the console from npm into the package: the versions and digests of package-lock.json.

    python console/build.py

Does nothing if they are there already. Needs npm; without it, it says so, and how to get it: the broker then serves no
console, and everything else.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TARGET = HERE.parent / "broker" / "natslog" / "console" / "vendor"
VERSIONS = "versions.json"
COPIED = {
    "@uwdata/flechette/dist/flechette.mjs": "arrow.js",
    "@uwdata/flechette/LICENSE": "arrow.LICENSE.txt",
    "htm/preact/standalone.module.js": "preact.js",  # Preact, its hooks, and htm
    "htm/LICENSE": "htm.LICENSE.txt",
    "uplot/dist/uPlot.esm.js": "uplot.js",
    "uplot/dist/uPlot.min.css": "uplot.css",
    "uplot/LICENSE": "uplot.LICENSE.txt",
}


def npm() -> str | None:
    return shutil.which("npm")


def wanted() -> str:
    """What the target states when it is current."""
    lock = json.loads((HERE / "package-lock.json").read_text())["packages"]
    libraries = {
        name.removeprefix("node_modules/"): {"version": one["version"], "licence": one["license"]}
        for name, one in lock.items()
        if name and not one.get("dev")
    }
    digest = hashlib.sha256(json.dumps([lock, COPIED]).encode()).hexdigest()
    return json.dumps({"libraries": libraries, "made_of": digest}, indent=2) + "\n"


def is_current() -> bool:
    stated = TARGET / VERSIONS
    return stated.is_file() and stated.read_text() == wanted()


def build() -> None:
    """Raises SystemExit: npm cannot install them."""
    program = npm()
    assert program is not None, "the caller has looked"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, folder)
        command = [program, "ci", "--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"natslog: npm cannot install the libraries of the console:\n{done.stdout}{done.stderr}")
        shutil.rmtree(TARGET, ignore_errors=True)
        TARGET.mkdir(parents=True)
        for source, name in COPIED.items():
            shutil.copy(Path(folder, "node_modules", source), TARGET / name)
    (TARGET / VERSIONS).write_text(wanted())


def main() -> None:
    if is_current():
        return
    if npm() is None:
        print(
            "natslog: npm was not found, so brokers serve no console in the browser (everything else works). To get "
            "it, install npm (Debian: apt-get install npm), then: make console",
            file=sys.stderr,
        )
        return
    build()
    print(f"copied the libraries of the console into {TARGET.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
