"""Pages by which an operator changes the cluster, and finds out what has stopped: brokers, consumers, dead letters."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import nats
import pytest
import urllib3
from nats.js.api import ConsumerInfo
from playwright.sync_api import expect

from natslog.node.lag_history import LAG_EVERY_S
from tests.cluster_harness import Cluster
from tests.console.conftest import Tab, publish
from tests.console.test_pages import settled
from tests.harness import eventually, with_nats

Result = TypeVar("Result")


def in_thread(cluster: Cluster, work: Callable[[nats.NATS], Coroutine[Any, Any, Result]]) -> Result:
    """Playwright runs an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(with_nats, cluster.nats_url, work).result()


def publish_with(cluster: Cluster, subject: str, *messages: tuple[bytes, dict[str, str]]) -> None:
    async def sent(connection: nats.NATS) -> None:
        for value, headers in messages:
            await connection.request(subject, value, headers=headers, timeout=30)

    in_thread(cluster, sent)


@pytest.fixture
def letters(cluster: Cluster) -> Iterator[str]:
    client = cluster.client()
    client.create_stream("letters", "letters")
    client.create_stream("target", "target.>")
    fits = {"Natslog-Error": "no responders", "Natslog-Subject": "target.a"}
    lost = {"Natslog-Error": "<b>no stream</b>", "Natslog-Subject": "nowhere"}
    publish_with(
        cluster, "letters", (b"one", fits), (b"two", fits), (b"three", fits), (b"four", lost), (b"no letter", {})
    )
    yield "letters"
    for name in ("letters", "target"):
        client.delete_stream(name)


@pytest.mark.long
def test_dead_letters_are_grouped_and_sent_again(tab: Tab, cluster: Cluster, letters: str) -> None:
    client = cluster.client()
    tab.open("letters?stream=letters")
    settled(tab, "Dead letters")
    tab.page.get_by_role("button", name="Show", exact=True).click()
    expect(tab.page.get_by_text("4 dead letters up to offset 5 of 5.")).to_be_visible()
    group = tab.page.locator("details.card", has_text="no responders")
    group.locator("summary").first.click()
    group.get_by_role("button", name="Check all").click()
    expect(group.get_by_role("status")).to_contain_text("3 can be sent, 0 not")
    assert client.stream("target")["messages"] == 0
    group.get_by_label("Select offset 1").check()
    group.get_by_role("button", name="Send 1 selected again").click()
    expect(group.get_by_role("status")).to_contain_text("1 sent, of which 0 were stored before")
    group.get_by_label("Select offset 1").uncheck()
    group.get_by_role("button", name="Send all 3 again").click()
    expect(group.get_by_role("status")).to_contain_text("3 sent, of which 1 were stored before")
    assert client.stream("target")["messages"] == 3
    lost = tab.page.locator("details.card", has_text="<b>no stream</b>")
    lost.locator("summary").first.click()
    lost.get_by_role("button", name="Send all 1 again").click()
    expect(lost.get_by_role("status")).to_contain_text("First reason: no stream records this subject")
    tab.page.get_by_label("Stream", exact=True).fill("none")
    tab.page.get_by_role("button", name="Show", exact=True).click()
    expect(tab.page.get_by_role("alert")).to_contain_text("none")
    tab.problems.clear()  # the refused request


def test_streams_whose_newest_message_is_a_dead_letter_are_offered(tab: Tab, cluster: Cluster, letters: str) -> None:
    client = cluster.client()
    client.create_stream("failed", "failed")
    publish_with(cluster, "failed", (b"x", {"Natslog-Error": "too large", "Natslog-Subject": "target.a"}))
    tab.open("letters")
    settled(tab, "Dead letters")
    offered = tab.page.locator("p.tools", has_text="Streams whose newest message").get_by_role("button")
    expect(offered).to_have_text(["failed"])  # the newest message of the other one is none
    offered.click()
    expect(tab.page.get_by_text("1 dead letters up to offset 1 of 1.")).to_be_visible()
    client.delete_stream("failed")


@pytest.mark.long
def test_sending_dead_letters_is_stopped_and_continued(tab: Tab, cluster: Cluster, letters: str) -> None:
    client, count = cluster.client(), 250
    headers = {"Natslog-Error": "many", "Natslog-Subject": "target.b"}
    publish_with(cluster, "letters", *[(b"%d" % at, headers) for at in range(count)])
    tab.open("letters?stream=letters")
    tab.page.get_by_role("button", name="Show", exact=True).click()
    group = tab.page.locator("details.card", has_text="many")
    group.locator("summary").first.click()
    group.get_by_label("At most").fill("50")  # it would take 5 s, in steps of one second
    group.get_by_role("button", name=f"Send all {count} again").click()
    expect(group.get_by_role("progressbar")).to_have_attribute("max", str(count))
    expect(group.get_by_role("status")).to_contain_text(re.compile(rf"^(50|100) of {count}"))
    show = tab.page.get_by_role("button", name="Show", exact=True)
    expect(show).to_be_disabled()  # other letters would replace those that are being sent
    group.get_by_role("button", name="Stop").click()
    expect(group.get_by_role("status")).to_contain_text("Stopped.")
    expect(group.get_by_role("button", name="Stop")).to_have_count(0)
    expect(show).to_be_enabled()
    shown = group.get_by_role("status").inner_text()
    (sent,) = re.findall(rf"of {count}: (\d+) sent, of which 0 were stored before, 0 not", shown)
    assert 0 < int(sent) < count
    tab.page.wait_for_timeout(1500)  # longer than a step
    assert client.stream("target")["messages"] == int(sent)
    group.get_by_label("At most").fill("")
    group.get_by_role("button", name=f"Send the {count - int(sent)} that are left").click()
    expect(group.get_by_role("status")).to_contain_text(f"{count - int(sent)} sent, of which 0 were stored before")
    assert client.stream("target")["messages"] == count
    group.get_by_label("At most").fill("50")
    group.get_by_role("button", name=f"Send all {count} again").click()
    expect(group.get_by_role("status")).to_contain_text(re.compile(rf"^(50|100) of {count}.* of which (50|100) were"))
    tab.open("streams")
    settled(tab, "Streams")
    seen: list[str] = []
    tab.page.on("request", lambda request: seen.append(request.url))
    tab.page.wait_for_timeout(1500)
    assert not [url for url in seen if "redrive" in url], "another page is shown"
    assert client.stream("target")["messages"] == count


@pytest.mark.long
def test_a_drain_is_previewed_and_done(tab: Tab, cluster: Cluster) -> None:
    client = cluster.client()
    client.create_stream("single", "single")
    client.move_stream("single", [3])
    eventually(lambda: client.stream("single")["replica_ids"] == [3], 30)
    tab.open("brokers")
    settled(tab, "Brokers")
    third = tab.page.get_by_role("region", name="Broker 3")
    third.get_by_text("Drain, remove, transfer").click()
    third.get_by_role("button", name="Show what draining would move").click()
    expect(third.get_by_role("status")).to_contain_text("It cannot be drained: stream 'shop0' has 3 replicas")
    names = [one["name"] for one in client.streams() if one["replicas"] == 3]
    for name in names:
        client.edit_stream(name, replicas=1)
    eventually(lambda: not any("target_replica_ids" in one for one in client.streams()), 60)
    try:
        third.get_by_role("button", name="Show what draining would move").click()
        expect(third.get_by_role("row", name="single")).to_be_visible()
        third.get_by_role("button", name="Drain broker 3").click()
        expect(third.get_by_text("draining", exact=True)).to_be_visible()
        eventually(lambda: client.stream("single")["replica_ids"] != [3], 40)
        expect(third.get_by_label("Remove: type broker 3")).to_be_visible(timeout=30_000)
        expect(third.get_by_role("button", name="Remove")).to_be_disabled()
        third.get_by_role("button", name="Stop draining").click()
        expect(third.get_by_text("It may hold replicas again.")).to_be_visible()
        expect(third.get_by_text("draining", exact=True)).to_have_count(0)
    finally:
        client.drain_broker(3, False)
        client.delete_stream("single")
        for name in names:
            client.edit_stream(name, replicas=3)
        cluster.wait_in_sync()


@pytest.mark.long
def test_moves_that_even_out_the_brokers_are_shown(tab: Tab, cluster: Cluster) -> None:
    client = cluster.client()
    for at in range(3):
        client.create_stream(f"on2-{at}", f"on2-{at}")
        client.move_stream(f"on2-{at}", [2])
    eventually(lambda: all(client.stream(f"on2-{at}")["replica_ids"] == [2] for at in range(3)), 40)
    tab.open("brokers")
    settled(tab, "Brokers")
    tab.page.get_by_role("button", name="Show the moves").click()
    balance = tab.page.get_by_role("region", name="Balance")
    expect(balance).to_contain_text("natslog cluster rebalance")
    expect(balance.get_by_role("row", name="on2-")).not_to_have_count(0)
    for at in range(3):
        client.delete_stream(f"on2-{at}")


@pytest.mark.long
def test_a_consumer_that_has_stopped_is_named(tab: Tab, cluster: Cluster) -> None:
    url = f"{cluster.brokers[0].url}/v1/cursors/late/shop0"
    assert urllib3.request("PUT", url, json={"offset": 120, "timestamp": "2026-01-01T00:00:00Z"}).status == 200
    tab.open("consumers")
    settled(tab, "Consumers")
    expect(tab.page.locator("p.failure")).to_contain_text("late", timeout=90_000)  # messages of a minute
    expect(tab.page.get_by_role("row", name="late")).to_contain_text("stopped for")
    tab.open("overview")
    settled(tab, "Overview")
    found = tab.page.locator(".findings li", has_text="consumer_stopped")
    expect(found).to_contain_text("late on shop0", timeout=1000 * (2 * LAG_EVERY_S + 60))
    expect(tab.page.get_by_text("Healthy:")).to_have_count(0)
    cluster.client().delete_cursor("late", "shop0")


@pytest.mark.long
def test_numbers_of_a_jetstream_consumer_are_those_of_its_info(tab: Tab, cluster: Cluster) -> None:
    """Its leader is another broker than the one that serves the page."""
    client = cluster.client()
    client.create_stream("jobs", "jobs")
    client.move_stream("jobs", [2])
    eventually(lambda: client.stream("jobs")["replica_ids"] == [2], 30)

    async def used(connection: nats.NATS) -> ConsumerInfo:
        jetstream = connection.jetstream(timeout=20)
        for at in range(50):
            await connection.request("jobs", b"%d" % at, timeout=30)
        subscription = await jetstream.pull_subscribe("", "worker", stream="jobs")
        messages = await subscription.fetch(20, timeout=20)
        for message in messages[:15]:
            await message.ack_sync(timeout=10)
        for message in messages[15:18]:
            await message.nak()
        await subscription.fetch(3, timeout=20)
        return await jetstream.consumer_info("jobs", "worker")

    info = in_thread(cluster, used)
    assert (info.num_pending, info.num_ack_pending, info.num_redelivered) == (30, 5, 3)
    tab.open("consumers")
    settled(tab, "Consumers")
    row = tab.page.get_by_role("row", name="jetstream:worker")
    assert row.get_by_role("cell").all_inner_texts()[6:9] == ["30", "5", "3"]
    row.get_by_role("button", name="jetstream:worker").click()
    delivered, floor = info.delivered, info.ack_floor
    for name, text in {
        "Pending: still": "30",
        "Ack pending:": "5",
        "Redelivered": "3",
        "Waiting pull requests": str(info.num_waiting),
        "Last delivered": f"{delivered.consumer_seq}, in the stream {delivered.stream_seq}",
        "Ack floor": f"{floor.consumer_seq}, in the stream {floor.stream_seq}",
    }.items():
        expect(tab.page.locator(".fact", has_text=name).locator("dd")).to_have_text(text)
    client.delete_stream("jobs")


@pytest.mark.long
def test_the_last_hour_of_a_consumer_is_plotted(tab: Tab, cluster: Cluster) -> None:
    def lags() -> dict[str, int]:
        found = cluster.brokers[0].json("/v1/history?stream=shop0")
        assert found["lags_every_s"] == LAG_EVERY_S
        series = found["lags"].get("billing", {})
        return {unit: values[-1] for unit, values in series.items()}

    eventually(lambda: lags().get("rows") == 50, LAG_EVERY_S + 20.0, "the lag is noted", every_s=0.5)
    assert 50 * len(b'{"order": 150, "paid": true}') < lags()["bytes"] < 10_000
    assert 0 < lags()["seconds"] < 3_600
    tab.open("consumers")
    settled(tab, "Consumers")
    tab.page.get_by_role("row", name="billing").get_by_role("button", name="billing").click()
    expect(tab.page.get_by_text("Messages that billing is behind on shop0")).to_be_visible()
    expect(tab.page.locator("figure canvas")).to_have_count(3)


@pytest.mark.long
def test_acks_and_connections_are_shown(tab: Tab, cluster: Cluster) -> None:
    tab.open("overview")
    settled(tab, "Overview")
    acks = tab.page.locator(".fact", has_text="Time to acks").locator("dd")
    for _ in range(20):  # it is that of the last seconds
        publish(cluster, "shop1.orders", [b"x"] * 500)
        if acks.inner_text().endswith("ms"):
            break
        tab.page.wait_for_timeout(1000)
    else:
        raise AssertionError("messages are acked, and the overview does not show in what time")
    tab.open("brokers")
    settled(tab, "Brokers")
    first = tab.page.get_by_role("region", name="Broker 1")
    expect(first.locator(".fact", has_text="Connections to NATS").locator("dd")).to_have_text("4 of 4")
