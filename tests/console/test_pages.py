"""The console in a real browser, in front of three brokers."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import urllib3
from playwright.sync_api import Browser, expect

from tests.cluster_harness import Cluster
from tests.console.conftest import Tab, from_the_first, publish

PLACES = {
    "overview": "Overview",
    "streams": "Streams",
    "streams/shop0": "shop0",
    "streams/shop0?part=publish": "shop0",
    "streams/shop0?part=files": "shop0",
    "streams/shop0?part=settings": "shop0",
    "consumers": "Consumers",
    "letters": "Dead letters",
    "brokers": "Brokers",
    "activity": "Activity",
    "access": "Access",
}
SHOWN_WITHIN_S = 5.0
HOSTILE = [
    b"<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>",
    b"\"'></code><svg onload=alert(1)>",
    b'{"__proto__": {"taken": 1}, "a": "</script><script>alert(1)</script>"}',
    "right to left \u202e and \x00\x1b[31m control".encode(),
    bytes(range(256)),
    b"",
]


def settled(tab: Tab, heading: str) -> None:
    expect(tab.page.get_by_role("heading", level=1)).to_have_text(heading)
    expect(tab.page.get_by_text("Loading…")).to_have_count(0)


@pytest.mark.parametrize(
    "place", [pytest.param(one, marks=() if one in ("overview", "streams") else pytest.mark.long) for one in PLACES]
)
def test_every_page_is_accessible_and_fits(tab: Tab, axe: str, place: str) -> None:
    """By axe-core (WCAG A and AA), in light and dark; at 360 px nothing but tables and code is wider than the page."""
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme)
        tab.open(place)
        settled(tab, PLACES[place])
        tab.page.evaluate(axe)
        found = tab.page.evaluate("axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] })")
        assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
    for width in (360, 3840):
        tab.page.set_viewport_size({"width": width, "height": 900})
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width


def test_pages_are_reached_by_keyboard(tab: Tab) -> None:
    tab.open("overview")
    settled(tab, "Overview")
    tab.page.keyboard.press("Tab")
    expect(tab.page.get_by_text("Skip to the content")).to_be_focused()
    for _ in range(3):  # the brand, Overview, Streams
        tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Enter")
    settled(tab, "Streams")


def test_overview_shows_the_cluster_and_what_changes(tab: Tab, cluster: Cluster) -> None:
    tab.open("overview")
    settled(tab, "Overview")
    expect(tab.page.get_by_text("Healthy: 3 of 3 brokers")).to_be_visible()
    expect(tab.page.locator(".fact", has_text="Brokers").locator("dd")).to_have_text("3 of 3")
    messages = tab.page.locator(".fact", has_text="Messages").locator("dd")
    for _ in range(20):  # the rate is that of the last seconds, and of brokers that answer in time
        publish(cluster, "shop1.orders", [b"x"] * 500)
        if messages.inner_text() != "0/s":
            break
        tab.page.wait_for_timeout(1000)
    else:
        raise AssertionError("messages are published, and the overview shows none")
    streams = tab.page.locator(".fact", has_text="Streams").locator("dd")
    expect(streams).to_have_text("8")
    cluster.client().create_stream("more", "more")
    expect(streams).to_have_text("9")
    cluster.client().delete_stream("more")
    expect(streams).to_have_text("8")


@pytest.mark.long
def test_a_dead_broker_appears_within_5_s_with_its_remedy_and_disappears_by_itself(tab: Tab, cluster: Cluster) -> None:
    """In a page that is open all the time, and not used; in another one, Brokers shows it as down."""
    page, broker = tab.page, cluster.brokers[2]
    other = page.context.new_page()
    other.goto(f"{tab.url}/#/brokers")
    state = other.get_by_role("region", name="Broker 3").get_by_role("heading")
    expect(state).to_have_text("Broker 3 voter")
    tab.open("overview")
    settled(tab, "Overview")
    healthy = page.get_by_text("Healthy: 3 of 3 brokers")
    found = page.locator(".findings li", has_text="broker_down")
    expect(healthy).to_be_visible(timeout=60_000)
    page.evaluate("window.wasLoadedBefore = true")
    after_s: list[float] = []
    while not after_s or (after_s[-1] > SHOWN_WITHIN_S and len(after_s) < 3):  # the machine may be busy
        broker.kill()
        killed_s = time.monotonic()
        expect(found).to_be_visible(timeout=60_000)
        after_s.append(time.monotonic() - killed_s)
        expect(found).to_contain_text("Error, broker 3: Broker 3 at")
        expect(found).to_contain_text("What to do: Start broker 3")
        expect(healthy).to_have_count(0)
        expect(state).to_have_text("Broker 3 down", timeout=30_000)
        broker.spawn()
        expect(healthy).to_be_visible(timeout=60_000)
        expect(found).to_have_count(0)
        expect(state).to_have_text("Broker 3 voter", timeout=30_000)
    assert after_s[-1] <= SHOWN_WITHIN_S, after_s
    assert page.evaluate("window.wasLoadedBefore"), "it was not loaded again"


@pytest.mark.long
def test_the_page_says_that_its_broker_is_gone_and_goes_on_when_it_is_back(browser: Browser, cluster: Cluster) -> None:
    broker = cluster.brokers[1]
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{broker.url}/#/overview")
        expect(page.get_by_text("Healthy: 3 of 3 brokers")).to_be_visible(timeout=30_000)
        broker.kill()
        expect(page.get_by_text("The connection to the broker was lost")).to_be_visible()
        others = [page.get_by_role("link", name=f"broker {number}") for number in (1, 3)]
        assert [one.get_attribute("href") for one in others] == [
            f"{cluster.brokers[at].url}/#/overview" for at in (0, 2)
        ]
        broker.spawn()
        expect(page.get_by_text("The connection to the broker was lost")).to_have_count(0, timeout=60_000)
        expect(page.get_by_text("Healthy: 3 of 3 brokers")).to_be_visible(timeout=60_000)


LONG = "a-stream-with-a-name-that-is-" + "much-longer-than-usual-" * 4


def test_nothing_is_cut_off_where_names_are_long(tab: Tab, cluster: Cluster) -> None:
    """On a desktop no table is wider than the page; on a telephone each row is a list of named values, and the
    navigation takes two lines.
    """
    client = cluster.client()
    client.create_stream(LONG, "long.>", replicas=3)
    client.set_cursor(LONG, LONG, 0)
    publish(cluster, "long.a", [b"x"])
    for width in (1440, 390):
        tab.page.set_viewport_size({"width": width, "height": 900})
        for place in ("streams", "consumers", "activity", f"streams/{LONG}?part=files"):
            tab.open(place)
            settled(tab, PLACES.get(place, LONG))
            expect(tab.page.locator("tbody tr").first).to_be_visible()
            sizes = "[...document.querySelectorAll('.scroll')].map((one) => [one.scrollWidth, one.clientWidth])"
            assert [size for size in tab.page.evaluate(sizes) if size[0] > size[1]] == [], (width, place)
    assert tab.page.evaluate("document.querySelector('header').clientHeight") < 100
    cell = tab.page.locator("tbody td").nth(1)
    assert cell.evaluate("(one) => getComputedStyle(one, '::before').content") == '"In sync"'
    client.delete_stream(LONG)


def test_axes_of_plots_repeat_no_time_and_have_whole_sizes(tab: Tab) -> None:
    tab.page.add_init_script("""
        window.texts = [];
        const write = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
          window.texts.push([this.canvas, text]);
          return write.call(this, text, ...place);
        };
    """)
    tab.open("overview")
    settled(tab, "Overview")
    expect(tab.page.locator("figure canvas")).to_have_count(4)
    texts = tab.page.evaluate("window.texts.map(([of, text]) => [of.closest('figure')?.innerText ?? '', text])")
    of_disk = [text for title, text in texts if title.startswith("Free disk")]
    times = [text for text in of_disk if text.endswith("Z")]
    assert len(times) > 1
    assert len(set(times)) == len(times)
    sizes = [text for text in of_disk if text.endswith("B")]
    assert len(sizes) > 1
    assert all(re.fullmatch(r"\d+ [KMGT]?i?B", text) for text in sizes), sizes


def test_buckets_are_marked_and_streams_show_their_subjects(tab: Tab, cluster: Cluster) -> None:
    client = cluster.client()
    client.create_stream("KV_settings", "$KV.settings.>")
    client.create_stream("wide", ["a.1", "a.2", "a.3", "a.4", "a.5"])
    tab.open("streams")
    settled(tab, "Streams")
    expect(tab.page.get_by_role("row", name="KV_settings")).to_contain_text("key-value bucket")
    expect(tab.page.get_by_role("row", name="wide")).to_contain_text("a.1, a.2, a.3, …")
    for name in ("KV_settings", "wide"):
        client.delete_stream(name)


def test_the_newest_messages_are_listed_from_the_newest_on(tab: Tab) -> None:
    tab.open("streams/shop0")
    settled(tab, "shop0")
    messages = tab.page.locator(".message")
    expect(messages.first).to_contain_text('"order": 199')
    expect(messages.last).to_contain_text('"order": 150')


@pytest.mark.long
def test_the_page_says_that_its_broker_hangs(browser: Browser, cluster: Cluster) -> None:
    """The connection stays open, and nothing comes over it."""
    broker = cluster.brokers[1]
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{broker.url}/#/overview")
        expect(page.get_by_text("Healthy: 3 of 3 brokers")).to_be_visible(timeout=60_000)
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            expect(page.get_by_text("The connection to the broker was lost")).to_be_visible(timeout=20_000)
            expect(page.get_by_role("link", name="broker 1")).to_be_visible()
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        expect(page.get_by_text("The connection to the broker was lost")).to_have_count(0, timeout=60_000)


def test_streams_are_searched_sorted_and_created(tab: Tab, cluster: Cluster) -> None:
    tab.open("streams")
    settled(tab, "Streams")
    rows = tab.page.locator("tbody tr")
    expect(rows).to_have_count(8)
    tab.page.get_by_role("searchbox", name="Search").fill("OP7")
    expect(rows).to_have_count(1)
    tab.page.get_by_role("searchbox", name="Search").fill("")
    sort = tab.page.get_by_role("button", name="Messages", exact=True)
    sort.click()
    sort.click()
    expect(tab.page.locator("th", has_text="Messages").nth(1)).to_have_attribute("aria-sort", "descending")
    tab.page.get_by_text("Create a stream").click()
    tab.page.get_by_label("Name", exact=True).fill("made here")
    tab.page.get_by_label("Subject", exact=True).fill("made.>")
    tab.page.get_by_label("Max age").fill("7d")
    expect(tab.page.locator(".create code")).to_have_text(
        "natslog stream create 'made here' --subject 'made.>' --max-age 7d"
    )
    tab.page.get_by_role("button", name="Create", exact=True).click()
    expect(tab.page.get_by_role("alert")).to_contain_text("name")
    tab.problems.clear()  # the refused request
    tab.page.get_by_label("Name", exact=True).fill("made-here")
    tab.page.get_by_role("button", name="Create", exact=True).click()
    settled(tab, "made-here")
    client = cluster.client()
    assert client.stream("made-here")["max_age"] == "7d"
    client.delete_stream("made-here")


@pytest.mark.long
def test_messages_are_browsed_and_searched_at_every_broker(browser: Browser, cluster: Cluster) -> None:
    for broker in cluster.brokers:  # those that do not lead the stream pass requests on
        with browser.new_context() as context:
            page = context.new_page()
            page.goto(f"{broker.url}/#/streams/shop0")
            expect(page.locator(".message")).to_have_count(50)
            page.get_by_label("Contains").fill('"order": 123')
            page.get_by_role("button", name="Show", exact=True).click()
            expect(page.locator(".message")).to_have_count(1)
            page.locator(".message summary").click()
            assert json.loads(page.locator(".message pre").inner_text()) == {"order": 123, "paid": True}
            page.get_by_role("button", name="Hex").click()
            expect(page.locator(".message pre")).to_contain_text("7b 22 6f 72 64 65 72")
            page.get_by_label("Contains").fill("")
            page.get_by_label("From offset").fill("10")
            page.get_by_role("button", name="Show", exact=True).click()
            expect(page.locator(".message").first).to_contain_text('"order": 10')
            page.get_by_role("button", name="Go on from offset").click()
            expect(page.locator(".message").first).to_contain_text('"order": 60')
            page.get_by_role("button", name="Show subjects").click()
            expect(page.get_by_role("cell", name="shop0.orders")).to_be_visible()


def test_hostile_messages_neither_run_nor_hang(tab: Tab, cluster: Cluster) -> None:
    client = cluster.client()
    client.create_stream("hostile", ["hostile", "h.>"])
    publish(cluster, "hostile", HOSTILE)
    publish(cluster, "h.<b>&amp;", [b"in the subject"])
    publish(cluster, "hostile", [b"x" * 900_000, b'{"a":' * 200_000])
    tab.open("streams/hostile")
    messages = from_the_first(tab)
    expect(messages).to_have_count(len(HOSTILE) + 3)
    for at in range(len(HOSTILE) + 3):
        messages.nth(at).locator("summary").click()
        expect(messages.nth(at).locator("pre")).to_be_attached()
    assert tab.page.title() == "hostile – natslog"
    expect(messages.nth(0).locator("pre")).to_contain_text("<img src=x onerror=")
    assert tab.page.locator("main img, main script, main svg").count() == 0
    expect(messages.nth(3).locator("pre")).to_contain_text("\\u202e and \\u0000\\u001b[31m")
    expect(messages.nth(6)).to_contain_text("h.<b>&amp;")
    expect(messages.nth(7)).to_contain_text("The first bytes of 879 KiB are shown.")
    client.delete_stream("hostile")


def test_json_is_shown_as_it_was_published(tab: Tab, cluster: Cluster) -> None:
    client = cluster.client()
    client.create_stream("exact", "exact")
    text = b'{"id":12345678901234567890,"price":1.10,"a":1,"a":2,"e":{},"l":[],"s":"x: {\\"y\\", 1}"}'
    publish(cluster, "exact", [text])
    tab.open("streams/exact")
    tab.page.locator(".message summary").click()
    assert tab.page.locator(".message pre").inner_text().split("\n") == [
        "{",
        '  "id": 12345678901234567890,',
        '  "price": 1.10,',
        '  "a": 1,',
        '  "a": 2,',
        '  "e": {},',
        '  "l": [],',
        '  "s": "x: {\\"y\\", 1}"',
        "}",
    ]
    tab.page.get_by_role("button", name="Tree").click()
    assert tab.page.locator(".tree ul > li").all_inner_texts() == [
        '"id" 12345678901234567890',
        '"price" 1.10',
        '"a" 1',
        '"a" 2',
        '"e" { 0 }',
        '"l" [ 0 ]',
        '"s" "x: {\\"y\\", 1}"',
    ]
    client.delete_stream("exact")


@pytest.mark.long
def test_parts_of_json_are_opened_one_by_one(tab: Tab, cluster: Cluster, axe: str) -> None:
    client = cluster.client()
    client.create_stream("deep", "deep")
    value = {"a": {"b": {"c": ["<img src=x onerror=alert(1)>", {"d": None}]}}, "many": list(range(250))}
    publish(cluster, "deep", [json.dumps(value).encode()])
    tab.open("streams/deep")
    tab.page.locator(".message summary").click()
    tab.page.get_by_role("button", name="Tree").click()
    tree = tab.page.locator(".tree")
    expect(tree).not_to_contain_text("onerror")
    for part in ('"b" { 1 }', '"c" [ 2 ]'):
        tree.get_by_text(part).click()
    expect(tree).to_contain_text("<img src=x onerror=alert(1)>")
    assert tab.page.locator("main img").count() == 0
    more = tree.get_by_role("button", name="Show more: 150 are left")
    expect(tree).to_contain_text("99 99")
    expect(tree).not_to_contain_text("100 100")
    more.click()
    expect(tree).to_contain_text("199 199")
    tab.page.evaluate(axe)
    found = tab.page.evaluate("axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] })")
    assert [one["id"] for one in found["violations"]] == []
    client.delete_stream("deep")


def test_consumers_and_their_lag(tab: Tab) -> None:
    tab.open("consumers")
    settled(tab, "Consumers")
    row = tab.page.get_by_role("row", name="billing")
    expect(row).to_contain_text("150")
    expect(row.get_by_role("cell").nth(3)).to_have_text("50")


def test_activity_is_shown_and_searched(tab: Tab) -> None:
    tab.open("activity")
    settled(tab, "Activity")
    expect(tab.page.get_by_text("stream.created").first).to_be_visible()
    tab.page.get_by_label("Contains").fill("shop3")
    tab.page.get_by_role("button", name="Show", exact=True).click()
    expect(tab.page.locator("tbody tr").first).to_contain_text("shop3")


def test_unknown_places_say_so(tab: Tab) -> None:
    tab.open("nothing")
    settled(tab, "Not found")
    tab.open("streams/none")
    settled(tab, "none")
    expect(tab.page.get_by_role("alert")).to_contain_text("none")
    tab.problems.clear()  # the refused request


def test_texts_do_not_run_together() -> None:
    """A line break before or after an element is no space: a template states one as ${" "}."""
    folder = Path(__file__).parents[2] / "broker" / "natslog" / "console"
    element = r"<(?:code|strong|a|button|span|time)\b"
    for module in [*folder.glob("*.js"), *folder.glob("pages/*.js")]:
        found = re.findall(rf"\n[^\n/]*[A-Za-z0-9.,:]\n +{element}[^\n]*", module.read_text())
        found += re.findall(r"</(?:code|strong|a|button|span)>\n +[A-Za-z(][a-z]* [^=\n]*", module.read_text())
        assert not found, f"{module.name}: {found}"


def test_files_of_the_console_are_complete() -> None:
    """Each module that a file imports is there."""
    folder = Path(__file__).parents[2] / "broker" / "natslog" / "console"
    modules = [*folder.glob("*.js"), *folder.glob("pages/*.js")]
    assert len(modules) > 8
    for module in modules:
        for line in module.read_text().splitlines():
            if line.startswith("import "):
                assert (module.parent / line.split('"')[1]).resolve().is_file(), f"{module.name}: {line}"


def test_files_of_the_console_are_requested_once(browser: Browser, cluster: Cluster) -> None:
    """Their path has a version: the browser keeps them, and the next page is one request, and the API."""
    with browser.new_context() as context:
        for expected in (True, False):
            page = context.new_page()
            page.goto(f"{cluster.brokers[0].url}/#/overview")
            expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
            timings = page.evaluate(
                "performance.getEntriesByType('resource').map((one) => [one.name, one.transferSize])"
            )
            sent = [name for name, size in timings if "/console/" in name and size > 0]
            assert bool(sent) is expected, sent
            assert not any("vendor/arrow.js" in name for name, _ in timings), "it is loaded when it is needed"
            page.close()


@pytest.mark.long
def test_a_page_of_another_version_finds_its_files(cluster: Cluster) -> None:
    broker = cluster.brokers[0]
    current = urllib3.request("GET", f"{broker.url}/").data.decode()
    (version,) = set(re.findall(r'"/console/([0-9a-f]{16})/', current))
    answers = {
        path: urllib3.request("GET", f"{broker.url}/console/{path}")
        for path in (
            f"{version}/app.js",
            "0123456789abcdef/app.js",
            "app.js",
            f"{version}/none.js",
            f"{version}/../app.py",
        )
    }
    assert [answer.status for answer in answers.values()] == [200, 200, 200, 404, 404]
    assert "immutable" in answers[f"{version}/app.js"].headers["Cache-Control"]
    assert answers["0123456789abcdef/app.js"].headers["Cache-Control"] == "no-cache"
