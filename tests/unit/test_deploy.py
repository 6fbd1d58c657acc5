"""The files of `deploy/`: rules and configuration that Prometheus accepts, a dashboard with no field that Grafana does
not have, and a row of docs/OPERATIONS.md for each alert.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from natslog.http.findings import CODES
from tests.prometheus import ALERTS, DASHBOARD, DEPLOY

OPERATIONS = (Path(__file__).parents[2] / "docs" / "OPERATIONS.md").read_text()
TEXT = ALERTS.read_text()
NAMES = re.findall(r"^ +- alert: (\w+)$", TEXT, re.MULTILINE)
CODES_OF_ALERTS = re.findall(r"labels: \{severity: (\w+), code: (\w+)\}", TEXT)
NO_ALERT = {"broker_silent", "consumer_stopped", "stream_dedupe_short"}
"""`up` is 0 for a broker that does not answer Prometheus: `broker_down`. NatslogConsumerBehind is for consumers
that stay behind for a quarter of an hour, stopped or not. A window of message ids that is shorter than configured is no
fault: publishers decide how many they send (`natslog_stream_dedupe_window_seconds`)."""

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool (Debian: apt-get install prometheus)"
)


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_accepts_the_configuration_and_its_rules() -> None:
    assert f"{len(NAMES)} rules found" in promtool("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))


@needs_promtool
def test_rules_with_series_that_faults_do_not_make() -> None:
    """Conditions that last for days, alerts that another one replaces, and the times until they fire."""
    promtool("test", "rules", str(Path(__file__).parent / "alerts_test.yml"))


def test_each_finding_has_an_alert_with_its_code_and_level() -> None:
    severities: dict[str, set[str]] = {}
    for severity, code in CODES_OF_ALERTS:
        severities.setdefault(code, set()).add(severity)
    assert CODES.keys() - severities.keys() == NO_ALERT
    levels = {"error": "critical", "warning": "warning"}
    assert {code: severities[code] for code in CODES.keys() - NO_ALERT} == {
        code: {levels[CODES[code]]} for code in CODES.keys() - NO_ALERT
    }


def test_each_alert_has_a_row_in_the_docs_with_its_anchor_code_and_severity() -> None:
    row = r'^\| `(\w+)` \| [^|]+ \| <a id="(\w+)"></a>(Natslog\w+) \| (critical|warning) \| [^|]+ \|$'
    rows = re.findall(row, OPERATIONS, re.MULTILINE)
    assert all(anchor == name.lower() for _, anchor, name, _ in rows)
    alerts = zip(NAMES, CODES_OF_ALERTS, strict=True)
    found = sorted((name, code, severity) for code, _, name, severity in rows)
    assert found == sorted((name, code, severity) for name, (severity, code) in alerts)
    runbooks = re.findall(r"^ +runbook: docs/OPERATIONS\.md#(\w+)$", TEXT, re.MULTILINE)
    assert runbooks == [name.lower() for name in NAMES]
    for field in ("summary", "description"):
        assert len(re.findall(rf"^ +{field}: \S", TEXT, re.MULTILINE)) == len(NAMES)


def unlike(given: Any, read: Any, path: str = "") -> list[str]:
    """Where the dashboard has something that is lost when Grafana's own classes read it."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [one for key, value in given.items() for one in unlike(value, read.get(key), f"{path}/{key}")]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [one for at, value in enumerate(given) for one in unlike(value, read[at], f"{path}/{at}")]
    return [] if given == read else [path]


def test_dashboard_has_only_fields_of_grafanas_schema() -> None:
    register_default_plugins()
    given = json.loads(DASHBOARD.read_text())
    assert unlike(given, as_grafana_reads(given)) == []
    given["panels"][1]["options"]["textMod"] = "value"
    assert unlike(given, as_grafana_reads(given)) == ["/panels/1/options/textMod"], "a typing error is found"


def as_grafana_reads(given: Any) -> Any:
    return json.loads(JSONEncoder().encode(Dashboard.from_json(given)))


def test_panels_have_places_of_their_own_and_names() -> None:
    shown = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in shown}) == len(shown)
    taken: dict[tuple[int, int], str] = {}
    for panel in shown:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} covers {taken[x, y]}"
                taken[x, y] = panel["title"]
