"""A broker without compiled kernels: it stores and serves as others do, and says everywhere that it is slow."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from tests.harness import all_values, publish_acked, running


def test_broker_without_compiled_kernels_works_and_says_that_it_is_slow(tmp_path: Path) -> None:
    with running(tmp_path, environment={"NATSLOG_KERNELS_FILE": ""}) as (server, broker), broker.client() as client:
        client.create_stream("orders", "orders.>")
        values = [b"%d" % number for number in range(2000)]
        answers = publish_acked(server.url, "orders.eu", values, headers={"Nats-Msg-Id": "once"})
        assert sum("duplicate" in answer for answer in answers) == len(values) - 1
        publish_acked(server.url, "orders.us", values)
        assert all_values(client, "orders") == values[:1] + values
        with urllib.request.urlopen(f"{broker.url}/v1/overview", timeout=30) as answer:
            (found,) = json.load(answer)["findings"]
        assert (found["code"], found["level"], found["where"]) == ("broker_not_compiled", "warning", "broker 1")
        assert "NATSLOG_KERNELS_FILE is empty" in found["what"]
        assert broker.metrics()["natslog_kernels_compiled"] == 0
        assert "no library of compiled kernels: NATSLOG_KERNELS_FILE is empty" in broker.output()
