"""The pages of the console with 2,000 streams in front of `natslog dev --brokers 3`, in a real browser: the time from
the request of a page to its last paint, and the screenshots of docs/console.
"""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from natslog.client import NatslogClient
from tests.bench.pairs import Comparison, console
from tests.bench.sides import ROOT, scratch
from tests.cluster_harness import running_cluster
from tests.harness import eventually, publish_acked

STREAMS = 2_000
_BUSY_S = 90  # of messages, before the cluster is idle: what the plots of the screenshots show
_REGIONS = ("eu", "us", "jp")
_NAMES = ["orders", "payments", "shipments", *(f"sensors-{at:04}" for at in range(STREAMS - 3))]
_PORT, _NATS_PORT = 19292, 14222  # the brokers have three ports, one after another
_BAR_MS = 200.0
_FAULT_BAR_S = 5.0
_PLACES = {
    "overview": "overview",
    "streams": "streams",
    "stream": "streams/orders",
    "publish": "streams/orders?part=publish",
    "files": "streams/orders?part=files",
    "settings": "streams/orders?part=settings",
    "consumers": "consumers",
    "dead letters": "letters",
    "brokers": "brokers",
    "activity": "activity",
    "access": "access",
}
_SHOWN = {
    "overview": "overview",
    "streams": "streams",
    "stream": "streams/orders",
    "brokers": "brokers",
    "consumers": "consumers",
}
_LAST_PAINT = """
let changed = true;
window.lastPaint = 0;
const everything = { subtree: true, childList: true, characterData: true, attributes: true };
new MutationObserver(() => { changed = true; }).observe(document, everything);
const frame = () => {
  const isThere = document.querySelector("h1") && !document.querySelector(".waiting");
  if (changed && isThere) window.lastPaint = performance.now();
  changed = false;
  requestAnimationFrame(frame);
};
requestAnimationFrame(frame);
// What changes in the cluster later is no part of the navigation: later events are delivered a second later.
const listen = EventSource.prototype.addEventListener;
EventSource.prototype.addEventListener = function (name, then) {
  let isFirst = true;
  listen.call(this, name, (event) => {
    if (isFirst) then(event);
    else setTimeout(then, 1000, event);
    isFirst = false;
  });
};
"""
_QUIET_MS = 700


def pages(navigations: int = 20, faults: int = 5) -> list[Comparison]:
    """A line for each page, and two for faults."""
    with _dev_cluster() as (url, nats_url):
        client = NatslogClient(url)
        _fill(client)
        with sync_playwright() as playwright:
            program = shutil.which("chromium")
            assert program is not None, "a browser is needed: apt-get install chromium"
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
            with _messages(client, nats_url):
                _take_screenshots(browser, url, ROOT / "docs" / "console")
            time.sleep(8)  # the rates of the last seconds are those of an idle cluster
            found = [_navigated(browser, url, title, place, navigations) for title, place in _PLACES.items()]
            found += _faults(browser, faults)
            browser.close()
        return found


@contextmanager
def _dev_cluster() -> Iterator[tuple[str, str]]:
    """URLs of the first broker and of NATS."""
    port, nats_port = _PORT, _NATS_PORT
    command = [sys.executable, "-m", "natslog", "dev", "--brokers", "3", "--nats-port", str(nats_port)]
    with scratch() as folder:
        process = subprocess.Popen(
            [*command, "--http-port", str(port), "--data-dir", str(folder)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            eventually(lambda: "ready" in process.stdout.readline(), 120, "the brokers are ready")
            yield f"http://127.0.0.1:{port}", f"nats://127.0.0.1:{nats_port}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _fill(client: NatslogClient) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: client.create_stream(name, f"{name}.>", replicas=3, max_age="7d"), _NAMES))
    for name, stream in [("billing", "orders"), ("reports", "orders"), ("lake", "payments")]:
        client.set_cursor(name, stream, 0)
    console.print(f"  {STREAMS} streams")


@contextmanager
def _messages(client: NatslogClient, nats_url: str) -> Iterator[None]:
    """Some streams have messages for a while before, and meanwhile: what the screenshots show."""
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        publishing = thread.submit(_publish_until, is_over, client, nats_url)
        try:
            time.sleep(_BUSY_S)
            yield
        finally:
            is_over.set()
            publishing.result()


def _publish_until(is_over: threading.Event, client: NatslogClient, nats_url: str) -> None:
    at, started_s = 0, time.monotonic()
    while not is_over.wait(0.2):
        count = int(400 + 300 * math.sin((time.monotonic() - started_s) / 12))
        for name in _NAMES[:3]:
            region = _REGIONS[at % 3]
            payloads = [
                b'{"id": %d, "region": "%s", "paid": true}' % (at + one, region.encode()) for one in range(count)
            ]
            publish_acked(nats_url, f"{name}.{region}", payloads)
        for name in _NAMES[3 + at % 900 : 3 + at % 900 + 20]:
            publish_acked(nats_url, f"{name}.c", [b'{"celsius": 20.5}'])
        at += count
        end = int(client.position("orders")["high_watermark"])
        client.set_cursor("billing", "orders", end)
        client.set_cursor("reports", "orders", max(0, end - 5_000))


def _take_screenshots(browser: Browser, url: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        with browser.new_context(viewport={"width": 1280, "height": 860}, color_scheme=scheme) as context:
            page = context.new_page()
            for name, place in _SHOWN.items():
                _open(page, url, place)
                if place == "streams/orders":
                    page.locator(".message summary").first.click()
                if scheme == "light" or name == "overview":
                    page.screenshot(path=folder / f"{name}{'' if scheme == 'light' else '-dark'}.png")


def _open(page: Page, url: str, place: str) -> None:
    page.goto("about:blank")
    page.goto(f"{url}/#/{place}")
    page.wait_for_selector("h1")
    expect(page.locator(".waiting")).to_have_count(0)  # a function that is waited for would be refused by the CSP
    page.wait_for_timeout(_QUIET_MS)


def _navigated(browser: Browser, url: str, title: str, place: str, navigations: int) -> Comparison:
    """Each time the whole page is requested, in a tab that shows a page of the console already."""
    found = Comparison(f"console, {STREAMS} streams: {title}", "ms", _BAR_MS, is_bound=True)
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        context.add_init_script(_LAST_PAINT)
        page = context.new_page()
        for at in range(navigations + 2):
            page.goto(f"{url}/?{at}#/{place}")
            expect(page.locator("h1")).to_be_visible()
            expect(page.locator(".waiting")).to_have_count(0)
            page.wait_for_timeout(_QUIET_MS)
            if at > 1:
                found.ours.append(round(page.evaluate("window.lastPaint"), 1))
    console.print(f"  {title}: {found.figure:.0f} ms (of {min(found.ours):.0f} to {max(found.ours):.0f})")
    return found


def _faults(browser: Browser, count: int) -> list[Comparison]:
    """From kill -9 of a broker until Overview names it, and from the first request that it answers again until Overview
    is healthy, with a page that is open all the time.
    """
    shown = Comparison("console: a dead broker is shown after", "s", _FAULT_BAR_S, is_bound=True)
    gone = Comparison("console: a repaired fault is gone after", "s", _FAULT_BAR_S, is_bound=True)
    with scratch() as folder, running_cluster(folder) as cluster, browser.new_context() as context:
        cluster.client().create_stream("orders", "orders", replicas=3)
        cluster.wait_in_sync()
        page, broker = context.new_page(), cluster.brokers[2]
        page.goto(f"{cluster.brokers[0].url}/#/overview")
        healthy, finding = page.get_by_text("Healthy:"), page.locator(".findings li", has_text="broker_down")
        for _ in range(count):
            expect(healthy).to_be_visible(timeout=60_000)
            broker.kill()
            killed_s = time.monotonic()
            expect(finding).to_contain_text("Start broker 3", timeout=60_000)
            shown.ours.append(round(time.monotonic() - killed_s, 2))
            broker.spawn()
            eventually(broker.ready, 60, "broker 3 is ready")
            cluster.wait_in_sync()
            repaired_s = time.monotonic()
            expect(healthy).to_be_visible(timeout=60_000)
            gone.ours.append(round(time.monotonic() - repaired_s, 2))
    for one in (shown, gone):
        console.print(f"  {one.title}: {one.figure:.1f} s (of {min(one.ours):.1f} to {max(one.ours):.1f})")
    return [shown, gone]
