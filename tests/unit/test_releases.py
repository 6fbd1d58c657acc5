"""What docs/RELEASES.md lists, and the files of a release."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.phases import PHASES

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SAME = {
    "apache": "Apache-2.0",
    "mit": "MIT",
    "bsd": "BSD",
    "3-clause bsd": "BSD",
    "gnu lesser": "LGPL",
    "lgpl": "LGPL",
}


FOR_A_CHECKOUT = {"demo", "test", "dev"}


def listed() -> dict[str, tuple[str, str]]:
    page = (ROOT / "docs" / "RELEASES.md").read_text()
    rows = re.findall(r"^\| ([a-z0-9-]+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    return {name: (parts, licence) for name, parts, licence in rows if name != "package"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;, ]", one)[0] for one in requirements}


def test_every_dependency_is_listed_with_its_parts() -> None:
    extras = {
        name: names(found) for name, found in PROJECT["optional-dependencies"].items() if name not in FOR_A_CHECKOUT
    }
    wanted: dict[str, list[str]] = {name: ["client"] for name in names(PROJECT["dependencies"])}
    for extra, found in extras.items():
        for name in found:
            wanted.setdefault(name, []).append(extra)
    assert {name: sorted(parts.split(", ")) for name, (parts, _) in listed().items()} == {
        name: sorted(parts) for name, parts in wanted.items()
    }


def test_licences_are_those_that_the_packages_state() -> None:
    wrong = {}
    for name, (_, licence) in listed().items():
        about = metadata(name)
        stated = [about.get("License-Expression"), about.get("License"), *(about.get_all("Classifier") or [])]
        text = " ".join(one.splitlines()[0] for one in stated if one).lower()
        kinds = {kind for word, kind in SAME.items() if word in text}
        if not any(licence.startswith(kind) for kind in kinds):
            wrong[name] = (licence, text[:100])
    assert not wrong


def test_versions_are_the_same_everywhere() -> None:
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "natslog" / "Chart.yaml").read_text())
    semantic = PROJECT["version"].replace(".dev", "-dev")
    assert (str(chart["version"]), str(chart["appVersion"])) == (semantic, PROJECT["version"])
    images = re.findall(r"image: natslog(?:-spark)?:(\S+)", (ROOT / "deploy" / "compose" / "compose.yaml").read_text())
    assert set(images) == {PROJECT["version"]}


@pytest.mark.long
def test_documentation_is_built_without_warnings(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "mkdocs"
    command = [program, "build", "--strict", "--site-dir", tmp_path / "site"]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = re.sub(r"<[^>]+>", "", (tmp_path / "site" / "API" / "index.html").read_text())
    for name in ("create_stream", "class Publisher", "LagListener", "SettingsConflict"):
        assert name.removeprefix("class ") in reference, name
    assert "natslog is a consumer of NATS" in (tmp_path / "site" / "index.html").read_text()


def test_workflow_runs_all_tests() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    jobs = workflow["jobs"]
    steps = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    as_root = 'sudo -E env "PATH=$PATH" '
    assert all(step.startswith(as_root) for some in steps.values() for step in some), "else tests are skipped"
    commands = {name: [step.removeprefix(as_root) for step in some] for name, some in steps.items()}
    assert commands["test"] == [".ci/run"]
    assert commands["long"][:2] == [".ci/install", 'make test-all PHASES="${{ matrix.phase }}"']
    assert commands["extended"][:2] == [".ci/install", "make test-extended"]
    phases = jobs["long"]["strategy"]["matrix"]["phase"]
    assert sorted(phases) == sorted(one.name for one in PHASES if "test-all" in one.commands)


def test_hooks_run_programs_of_the_checkout() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert all(hook["entry"].startswith(".venv/bin/") and hook["language"] == "system" for hook in hooks)
