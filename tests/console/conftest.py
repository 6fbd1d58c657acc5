"""A real browser (Chromium of the system), and three brokers for it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.cluster_harness import Cluster, running_cluster
from tests.harness import publish_acked

ROOT = Path(__file__).parents[2]
REMEDY = "a browser is needed: apt-get install chromium"
NODE = "npm is needed for axe-core: apt-get install npm"


@pytest.fixture(scope="module")  # its event loop must not outlast these tests
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program is not None, REMEDY
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core, which checks accessibility."""
    npm = shutil.which("npm")
    assert npm is not None, NODE
    folder = ROOT / ".test-cache" / "console"
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not script.is_file():
        for name in ("package.json", "package-lock.json"):
            shutil.copy(ROOT / "console" / name, folder)
        subprocess.run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder, check=True)
    return script.read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("console"), has_leafnodes=True) as found:
        client = found.client()
        for at in range(8):
            client.create_stream(f"shop{at}", f"shop{at}.>", replicas=3)
        publish(found, "shop0.orders", [b'{"order": %d, "paid": true}' % at for at in range(200)])
        client.set_cursor("billing", "shop0", 150)
        found.wait_in_sync()
        yield found


def publish(cluster: Cluster, subject: str, payloads: list[bytes]) -> None:
    """In a thread: Playwright runs an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(publish_acked, cluster.nats_url, subject, payloads).result()


class Tab:
    """A page of the browser that notes what must not happen: errors in the console, and requests to elsewhere."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.problems: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("console", lambda line: self.problems.append(line.text) if line.type == "error" else None)
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((url, "data:", "blob:"))
                else self.problems.append(f"request to {request.url}")
            ),
        )
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}") or dialog.dismiss())

    def open(self, place: str) -> None:
        self.page.goto(f"{self.url}/#/{place}")


@pytest.fixture
def tab(browser: Browser, cluster: Cluster) -> Iterator[Tab]:
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        found = Tab(context.new_page(), cluster.brokers[0].url)
        found.page.set_default_timeout(15_000)
        yield found
        assert not found.problems


def from_the_first(tab: Tab) -> Locator:
    """The messages that the open page of a stream shows, the first one first."""
    expect(tab.page.get_by_text("the newest first")).to_have_count(1)
    tab.page.get_by_label("From offset or time").fill("0")
    tab.page.get_by_role("button", name="Show", exact=True).click()
    expect(tab.page.get_by_text("the newest first")).to_have_count(0)
    return tab.page.locator(".message")
