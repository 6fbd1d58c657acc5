"""A real Prometheus that scrapes brokers every second, and evaluates the rules of `deploy/prometheus/alerts.yml`."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import urllib3

from natslog.nats_server import end_with_parent, free_port
from tests.harness import eventually

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "natslog.json"
SCRAPED_EVERY_S = 1.0
_START_WITHIN_S = 30.0
_CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s, scrape_timeout: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: natslog
    file_sd_configs: [{{files: [{targets}], refresh_interval: 1s}}]
  - job_name: natslog-tls
    scheme: https
    tls_config: {{ca_file: {ca}, insecure_skip_verify: false}}
    file_sd_configs: [{{files: [{targets_tls}], refresh_interval: 1s}}]
"""


def quick_rules(behind_s: int) -> str:
    """The rules as they are, but a condition must last for 2 s only before an alert fires, and with another limit for
    the lag of consumers.
    """
    text, lasting = re.subn(r"^( +for:) \S+$", r"\1 2s", ALERTS.read_text(), flags=re.MULTILINE)
    text, limits = re.subn(r"lag_seconds > 900\b", f"lag_seconds > {behind_s}", text)
    assert lasting > 10, "the durations were found"
    assert limits == 2, "so were the limits"
    return text


def panels() -> list[tuple[str, str]]:
    """Title and expression of everything that the dashboard shows, with its variables set to All."""
    shown = json.loads(DASHBOARD.read_text())["panels"]
    variables = {"$__rate_interval": "15s", "$cluster": ".*", "$broker": ".*", "$stream": ".*"}
    found = []
    for panel in shown:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, value in variables.items():
                expression = expression.replace(name, value)
            assert "$" not in expression, f"{panel['title']} uses another variable: {expression}"
            found.append((panel["title"], expression))
    return found


class Prometheus:
    """A process of its own; `stop` it. It scrapes nothing until it gets targets."""

    def __init__(self, folder: Path, rules: str, ca_file: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._url = f"http://127.0.0.1:{free_port()}"
        self._log = folder / "prometheus.log"
        self._http = urllib3.PoolManager(retries=False, timeout=10)
        (folder / "alerts.yml").write_text(rules)
        for job in ("natslog", "natslog-tls"):
            self._file_of(job).write_text("[]")
        files = {"targets": self._file_of("natslog"), "targets_tls": self._file_of("natslog-tls"), "ca": ca_file}
        (folder / "prometheus.yml").write_text(_CONFIG.format(rules=folder / "alerts.yml", **files))
        command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self._url.removeprefix('http://')}",
        ]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=end_with_parent)
        eventually(self._is_ready, _START_WITHIN_S, "Prometheus is ready")

    def _file_of(self, job: str) -> Path:
        return self._folder / f"{job}.json"

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            return self._http.request("GET", f"{self._url}/-/ready").status == 200
        except urllib3.exceptions.HTTPError:
            return False

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def scrape(self, job: str, cluster: str, targets: Sequence[str]) -> None:
        """From now on, every second."""
        new = self._folder / "new"
        new.write_text(json.dumps([{"targets": list(targets), "labels": {"cluster": cluster}}]))
        new.rename(self._file_of(job))

    def _get(self, path: str, **fields: str) -> Any:
        answer = self._http.request("GET", f"{self._url}/api/v1/{path}", fields=fields)
        body = json.loads(answer.data)
        assert body["status"] == "success", (fields, body)
        return body["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series now; a scalar has no labels."""
        data = self._get("query", query=expression)
        found = [{"metric": {}, "value": data["result"]}] if data["resultType"] == "scalar" else data["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def values_since(self, expression: str, started_s: float) -> list[float]:
        """Of all series, every 2 s since a time."""
        data = self._get("query_range", query=expression, start=str(started_s), end=str(time.time()), step="2")
        return [float(value) for one in data["result"] for _, value in one["values"]]

    def rules(self) -> set[str]:
        """The names of the alerts."""
        return {rule["name"] for group in self._get("rules")["groups"] for rule in group["rules"]}

    def firing(self) -> list[dict[str, Any]]:
        """Labels and annotations of the alerts that fire now."""
        return [one for one in self._get("alerts")["alerts"] if one["state"] == "firing"]

    def ever_fired(self) -> set[str]:
        found = self.query('count by (alertname) (count_over_time(ALERTS{alertstate="firing"}[1h]))')
        return {labels["alertname"] for labels, _ in found}

    def series(self) -> list[dict[str, str]]:
        """Labels of every series of the brokers so far."""
        found: list[dict[str, str]] = self._get(
            "series", **{"match[]": '{job=~"natslog.*", __name__!~"up|scrape_.*|ALERTS.*"}'}
        )
        return found
