"""Values of 5 MB, which a NATS server can be configured to accept: they neither execute nor stop the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.console.conftest import Tab, from_the_first
from tests.harness import publish_acked, running

SIZE = 5_000_000
VALUES = {
    "text": b"x" * SIZE,
    "html": b"<script>document.title = 'taken'</script><img src=x onerror=alert(1)>" * (SIZE // 68),
    "nested": b'{"a":' * (SIZE // 5),
    "numbers": b"[" + b"1," * (SIZE // 2 - 2) + b"1]",
    "one line": b'{"text": "' + "\u202e\u0000é".encode() * (SIZE // 6) + b'"}',
    "binary": bytes(range(256)) * (SIZE // 256),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("large")
    (folder / "nats.conf").write_text("max_payload: 8MB\n")
    with running(folder, nats_arguments=("--config", str(folder / "nats.conf"))) as (nats, broker):
        broker.client().create_stream("large", "large")
        publish_acked(nats.url, "large", list(VALUES.values()))
        yield broker.url


@pytest.mark.long
def test_values_of_5_mb_are_shown_in_part(url: str, browser: Browser) -> None:
    """The broker comes first: Playwright runs an event loop in this thread, which publishing cannot use."""
    with browser.new_context() as context:
        tab = Tab(context.new_page(), url)
        tab.page.set_default_timeout(15_000)
        tab.open("streams/large")
        messages = from_the_first(tab)
        expect(messages).to_have_count(len(VALUES))
        for at in range(len(VALUES)):
            message = messages.nth(at)
            message.locator("summary").click()
            expect(message).to_contain_text("The first bytes of ")
            message.get_by_role("button", name="Load up to 1 MiB of the value").click()
            expect(message.get_by_role("button", name="Load up to")).to_have_count(0)
            expect(message).to_contain_text("The first bytes of ")
            for kind in message.get_by_role("group").get_by_role("button").all():
                kind.click()
            assert tab.page.evaluate("1 + 1") == 2, "it responds"
            message.locator("summary").click()
        assert tab.page.title() == "large – natslog"
        assert tab.page.locator("main img, main script").count() == 0
        assert tab.problems == []
