"""Signing in to the console of a broker with security, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.harness import eventually, running


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URL of a broker, and the token of its administrator."""
    with running(tmp_path_factory.mktemp("sign-in"), environment={"NATSLOG_SECURITY": "true"}) as (_, broker):
        tokens = eventually(lambda: [line for line in broker.output().splitlines() if line.startswith("nlt_")])
        yield broker.url, tokens[0]


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.new_context() as context:
        found, errors = context.new_page(), list[str]()
        found.on("pageerror", lambda error: errors.append(str(error)))
        found.set_default_timeout(15_000)
        yield found
        assert errors == []


def sign_in(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()


def must_sign_in(page: Page) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")


@pytest.mark.long
def test_token_opens_the_pages_until_signing_out(page: Page, secured: tuple[str, str]) -> None:
    url, token = secured
    page.goto(f"{url}/#/streams")
    must_sign_in(page)
    sign_in(page, "nlt_wrong")
    expect(page.get_by_role("alert")).to_be_visible()
    sign_in(page, token)
    expect(page.get_by_text("admin")).to_be_visible()
    page.reload()  # a page that begins with what is known of the session: its first change has the right header
    page.get_by_text("Create a stream").click()
    page.get_by_label("Name").fill("orders")
    page.get_by_label("Subject").fill("orders")
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("orders")
    stored = page.evaluate("JSON.stringify([{ ...sessionStorage }, { ...localStorage }, document.cookie])")
    csrf = page.evaluate("fetch('/v1/session').then((answer) => answer.json()).then((found) => found.csrf)")
    assert csrf, "the session has one"
    assert csrf not in stored, "a script of another page cannot find it"
    assert token not in stored
    page.get_by_role("button", name="Sign out").click()
    must_sign_in(page)
    page.reload()
    must_sign_in(page)


@pytest.mark.long
def test_session_that_ended_elsewhere_leads_to_signing_in(page: Page, secured: tuple[str, str]) -> None:
    url, token = secured
    page.goto(f"{url}/#/overview")
    sign_in(page, token)
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    page.context.clear_cookies()
    page.reload()
    must_sign_in(page)
    sign_in(page, token)
    expect(page.get_by_text("Healthy:")).to_be_visible()


@pytest.mark.long
def test_signing_out_shows_nothing_of_the_former_user_in_any_tab(page: Page, secured: tuple[str, str]) -> None:
    url, token = secured
    page.add_init_script("""
        window.opened = [];
        const Source = EventSource;
        window.EventSource = class extends Source {
          constructor(place) { super(place); window.opened.push(this); }
        };
    """)
    page.goto(f"{url}/#/overview")
    sign_in(page, token)
    expect(page.get_by_text("Healthy:")).to_be_visible()
    other = page.context.new_page()
    other.goto(f"{url}/#/streams")
    expect(other.get_by_role("heading", level=1)).to_have_text("Streams")
    page.context.clear_cookies()
    page.evaluate("dispatchEvent(new Event('natslog-refused'))")
    must_sign_in(page)
    sign_in(page, token)
    expect(page.get_by_text("Healthy:")).to_be_visible()
    page.wait_for_timeout(4_000)  # longer than until a connection is opened again
    assert page.evaluate("window.opened.filter((one) => one.readyState !== EventSource.CLOSED).length") == 1
    page.get_by_role("button", name="Sign out").click()
    must_sign_in(page)
    must_sign_in(other)
    assert page.evaluate("window.opened.every((one) => one.readyState === EventSource.CLOSED)")
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.long
def test_pages_work_where_the_browser_keeps_nothing(page: Page, secured: tuple[str, str]) -> None:
    url, token = secured
    page.add_init_script("Object.defineProperty(window, 'sessionStorage', { get() { throw new Error('refused'); } })")
    page.goto(f"{url}/#/overview")
    sign_in(page, token)
    expect(page.get_by_text("Healthy:")).to_be_visible()
