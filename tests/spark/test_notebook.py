"""`notebooks/` from top to bottom, each by a real kernel, against a real broker."""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from natslog.client import NatslogClient
from tests.harness import BrokerProcess
from tests.notebooks import NOTEBOOKS, digest, executed, opened

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


class Done:
    """What a notebook printed and drew."""

    def __init__(self, name: str, folder: Path) -> None:
        outputs: list[Any] = [output for cell in executed(name, folder).cells for output in cell.get("outputs", [])]
        self.text = "".join(output.get("text", "") for output in outputs)
        self.images = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]

    def number(self, before: str) -> int:
        found = re.search(rf"{re.escape(before)}:? (\d+)", self.text)
        assert found is not None, self.text
        return int(found.group(1))

    def check_plot(self) -> None:
        """There is one, with something drawn on it."""
        assert len(self.images) == 1
        image = base64.b64decode(self.images[0])
        assert image.startswith(b"\x89PNG")
        assert len(image) > 20_000


@pytest.fixture(autouse=True)
def addresses(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATSLOG_SERVER", broker.url)
    monkeypatch.setenv("NATS_URL", broker.nats_url)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")))
def test_notebook_is_committed_with_the_outputs_of_its_code(name: str) -> None:
    """Whoever only browses the repository sees what it shows; and nothing of the machine that it ran on."""
    notebook = opened(name)
    nbformat.validate(notebook)
    assert notebook.metadata["natslog"]["code"] == digest(notebook), "make notebooks"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not any(output.get("name") == "stderr" for output in outputs)
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 1
    assert base64.b64decode(pictures[0]).startswith(b"\x89PNG")
    assert len((NOTEBOOKS / name).read_bytes()) < 400 * 1024
    text = "".join(output.get("text", "") for output in outputs)
    assert text
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)


@pytest.mark.extended
def test_backfill_reads_and_plots_the_range(client: NatslogClient, folder: Path) -> None:
    done = Done("backfill.ipynb", folder)
    stored = client.stream("pumps")["high_watermark"]
    in_range = done.number("messages in the range")
    assert done.number("messages in the stream") == stored == 720
    assert done.number("aggregated readings") == in_range
    found = re.search(r"epoch milliseconds: (\d+) to (\d+)", done.text)
    assert found is not None, done.text
    start, end = (client.offset_at("pumps", int(moment))[0] for moment in found.groups())
    assert in_range == end - start
    assert 0.4 * stored < in_range < 0.9 * stored
    done.check_plot()


@pytest.mark.long
def test_live_stream_draws_again_and_again_and_counts_every_reading(client: NatslogClient, folder: Path) -> None:
    done = Done("live_stream.ipynb", folder)
    times, first, last = done.number("drawn"), done.number("times, with"), done.number("at first and")
    assert times >= 3
    assert first < last
    stored = client.stream("machines")["high_watermark"]
    assert done.number("published and acked") == done.number("counted by the query") == stored >= last
    done.check_plot()


@pytest.mark.extended
def test_real_time_draws_the_times_of_messages_on_their_way(client: NatslogClient, folder: Path) -> None:
    done = Done("real_time.ipynb", folder)
    assert done.number("drawn") >= 3
    assert done.number("batches that have ended meanwhile") == 0, "rows do not wait for the end of a batch"
    assert client.stream("celsius")["high_watermark"] > 1000
    done.check_plot()


@pytest.mark.extended
def test_lag_and_throughput_shows_a_query_fall_behind_and_catch_up(client: NatslogClient, folder: Path) -> None:
    done = Done("lag_and_throughput.ipynb", folder)
    assert 1500 < done.number("most rows behind") <= 3000
    assert done.number("rows behind in the end") == 0
    assert done.number("micro-batches") > 3000 // 500
    for gauge in ("rows_behind", "bytes_behind"):
        assert f'natslog_query_{gauge}{{query="meters",stream="meters"}} 0.0' in done.text
    assert client.stream("meters")["high_watermark"] > 3000
    done.check_plot()
