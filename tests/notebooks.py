"""`make notebooks`: runs `notebooks/` from top to bottom against a broker, and stores what they print and draw.

    python -m tests.notebooks

What a notebook writes to standard error is left out: it has times and paths of one machine. A digest of the code is
stored with the outputs, so that a test notices a cell that was changed afterwards.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.harness import running

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
_WITHIN_S = 240


def opened(name: str) -> Any:
    return nbformat.reads((NOTEBOOKS / name).read_text(), as_version=4)  # type: ignore[no-untyped-call]


def digest(notebook: Any) -> str:
    """Of the code of all cells."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def executed(name: str, folder: Path) -> Any:
    """The notebook as a kernel in this folder leaves it; its addresses come from the environment."""
    notebook = opened(name)
    NotebookClient(
        notebook, timeout=_WITHIN_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return notebook


def _store(name: str, notebook: Any) -> None:
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {
        "kernelspec": kernel,
        "language_info": {"name": "python"},
        "natslog": {"code": digest(notebook)},
    }
    nbformat.validate(notebook)
    (NOTEBOOKS / name).write_text(nbformat.writes(notebook) + "\n")  # type: ignore[no-untyped-call]


def main() -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as name, running(Path(name) / "own") as (nats, broker):
            os.environ |= {"NATSLOG_SERVER": broker.url, "NATS_URL": nats.url}
            work = Path(name) / "work"
            work.mkdir()
            _store(path.name, executed(path.name, work))
            print(f"{path.name}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
