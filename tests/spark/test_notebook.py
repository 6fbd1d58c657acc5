"""`notebooks/backfill.ipynb` from top to bottom, by a real kernel, against a real broker."""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from natslog.client import NatslogClient
from tests.harness import BrokerProcess

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "backfill.ipynb"


def printed_number(outputs: str, before: str) -> int:
    found = re.search(rf"{re.escape(before)}: (\d+)", outputs)
    assert found is not None, outputs
    return int(found.group(1))


def printed_range(outputs: str) -> tuple[int, int]:
    found = re.search(r"epoch milliseconds: (\d+) to (\d+)", outputs)
    assert found is not None, outputs
    return int(found.group(1)), int(found.group(2))


def test_notebook_is_committed_without_outputs() -> None:
    notebook = nbformat.reads(NOTEBOOK.read_text(), as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


def test_notebook_runs_from_top_to_bottom_and_plots_the_range(
    broker: BrokerProcess, client: NatslogClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATSLOG_SERVER", broker.url)
    monkeypatch.setenv("NATS_URL", broker.nats_url)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    notebook = nbformat.reads(NOTEBOOK.read_text(), as_version=4)  # type: ignore[no-untyped-call]

    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()

    outputs: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    stored = client.stream("pumps")["high_watermark"]
    in_range = printed_number(text, "messages in the range")
    assert printed_number(text, "messages in the stream") == stored == 720
    assert printed_number(text, "aggregated readings") == in_range
    start, end = (client.offset_at("pumps", moment)[0] for moment in printed_range(text))
    assert in_range == end - start
    assert 0.4 * stored < in_range < 0.9 * stored
    images = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(images) == 1
    image = base64.b64decode(images[0])
    assert image.startswith(b"\x89PNG")
    assert len(image) > 20_000
    (folder / "plot.png").write_bytes(image)
