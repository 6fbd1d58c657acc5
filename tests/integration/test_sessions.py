"""Sign-in for browsers: the cookie, the header that changes need, and requests of pages of other sites."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest

from tests.harness import BrokerProcess, eventually, running


class Browser:
    """Keeps the cookie as one does."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker, self.cookie, self.csrf = broker, "", ""
        self.set_cookie = ""

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        given = {"Cookie": self.cookie} if self.cookie else {}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self._broker.http_port, timeout=30)
        connection.request(method, path, None if body is None else json.dumps(body), given)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if answer.getheader("Set-Cookie"):
            self.set_cookie = str(answer.getheader("Set-Cookie"))
            morsel = next(iter(SimpleCookie(self.set_cookie).values()))
            self.cookie = f"{morsel.key}={morsel.value}" if morsel.value else ""
        return answer.status, json.loads(data) if data else None

    def sign_in(self, token: str) -> int:
        status, found = self.ask("POST", "/v1/session", {"token": token})
        self.csrf = found.get("csrf", "")
        return status


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerProcess, str]]:
    with running(tmp_path_factory.mktemp("sessions"), environment={"NATSLOG_SECURITY": "true"}) as (_, broker):

        def printed() -> list[str]:
            return [line for line in broker.output().splitlines() if line.startswith("nlt_")]

        yield broker, eventually(printed, what="the token of the administrator is printed")[0]


@pytest.fixture
def browser(secured: tuple[BrokerProcess, str]) -> Browser:
    return Browser(secured[0])


@pytest.fixture
def token(secured: tuple[BrokerProcess, str]) -> str:
    return secured[1]


def test_cookie_stands_for_the_token_until_signing_out(browser: Browser, token: str) -> None:
    assert browser.ask("GET", "/v1/session")[1]["needs_token"]
    assert browser.ask("GET", "/v1/cluster")[0] == 401
    assert browser.sign_in(token) == 201
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in browser.set_cookie.split(";")}
    assert token not in browser.set_cookie
    assert browser.ask("GET", "/v1/cluster")[0] == 200
    state = browser.ask("GET", "/v1/session")[1]
    assert (state["needs_token"], state["identity"], state["may_administer"]) == (False, "admin", True)
    assert state["csrf"] == browser.csrf
    stolen = Browser(browser._broker)
    stolen.cookie = browser.cookie
    assert stolen.ask("GET", "/v1/cluster")[0] == 200
    assert browser.ask("DELETE", "/v1/session", Natslog_Csrf=browser.csrf)[0] == 204
    assert browser.cookie == ""
    assert stolen.ask("GET", "/v1/cluster")[0] == 401, "signing out ends the session, not only the cookie"


def test_signing_out_ends_what_is_in_progress(browser: Browser, token: str) -> None:
    assert browser.sign_in(token) == 201
    connection = http.client.HTTPConnection("127.0.0.1", browser._broker.http_port, timeout=30)
    connection.request("GET", "/v1/live", headers={"Cookie": browser.cookie})
    events = connection.getresponse()
    assert events.status == 200
    assert events.readline()
    assert browser.ask("DELETE", "/v1/session", Natslog_Csrf=browser.csrf)[0] == 204
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        events.read()
    connection.close()


def test_a_change_with_the_cookie_needs_the_header(browser: Browser, token: str) -> None:
    browser.sign_in(token)
    body = {"name": "changed", "subject": "changed"}
    for headers in ({}, {"Natslog_Csrf": "x"}, {"Natslog_Csrf": browser.csrf + "x"}):
        status, error = browser.ask("POST", "/v1/streams", body, **headers)
        assert (status, error["error"]["code"]) == (403, "forbidden")
    assert browser.ask("GET", "/v1/streams/changed")[0] == 404
    assert browser.ask("POST", "/v1/streams", body, Natslog_Csrf=browser.csrf)[0] == 201
    assert browser.ask("DELETE", "/v1/streams/changed")[0] == 403
    other = Browser(browser._broker)
    other.sign_in(token)
    assert browser.ask("DELETE", "/v1/streams/changed", Natslog_Csrf=other.csrf)[0] == 403, "of another session"
    assert browser.ask("DELETE", "/v1/streams/changed", Natslog_Csrf=browser.csrf)[0] == 204


def test_a_given_token_counts_more_than_the_cookie(browser: Browser, token: str) -> None:
    browser.sign_in(token)
    status, created = browser.ask("POST", "/v1/tokens", {"identity": "nobody"}, Natslog_Csrf=browser.csrf)
    assert status == 201
    assert browser.ask("GET", "/metrics", Authorization=f"Bearer {created['token']}")[0] == 403


@pytest.mark.parametrize("wrong", ["", "x", "nlt_000000000000_" + "A" * 43, "nlt_ü", "a\nb"])
def test_wrong_tokens_begin_no_session(browser: Browser, wrong: str) -> None:
    assert browser.ask("POST", "/v1/session", {"token": wrong})[0] == 401
    assert browser.cookie == ""


@pytest.mark.parametrize("body", [{}, {"token": 5}, {"token": "a", "more": 1}, [], "text"])
def test_what_is_no_sign_in_is_refused(browser: Browser, body: Any) -> None:
    assert browser.ask("POST", "/v1/session", body)[0] == 400


def test_revoked_token_ends_its_sessions(browser: Browser, token: str) -> None:
    admin = {"Authorization": f"Bearer {token}"}
    _, created = browser.ask("POST", "/v1/tokens", {"identity": "admin2"}, **admin)
    assert browser.sign_in(created["token"]) == 201
    assert browser.ask("GET", "/v1/whoami")[0] in (200, 403)
    browser.ask("DELETE", f"/v1/tokens/{created['id']}", **admin)
    assert browser.ask("GET", "/v1/whoami")[0] == 401


def test_the_token_is_in_no_log(secured: tuple[BrokerProcess, str], browser: Browser) -> None:
    broker, token = secured
    browser.sign_in(token)
    secret = token.split("_", 2)[2]
    assert broker.output().count(secret) == 1, "where the first start printed it"


def test_one_identity_does_not_end_the_sessions_of_others(browser: Browser, token: str) -> None:
    browser.sign_in(token)
    admin = {"Authorization": f"Bearer {token}"}
    _, created = browser.ask("POST", "/v1/tokens", {"identity": "many"}, **admin)
    others = [Browser(browser._broker) for _ in range(12)]
    assert {one.sign_in(created["token"]) for one in others} == {201}
    assert browser.ask("GET", "/v1/cluster")[0] == 200
    assert [one.ask("GET", "/v1/session")[1]["needs_token"] for one in others] == [True] * 2 + [False] * 10


def test_signing_in_again_ends_the_session_before(browser: Browser, token: str) -> None:
    browser.sign_in(token)
    former = Browser(browser._broker)
    former.cookie = browser.cookie
    assert browser.sign_in(token) == 201, "without the value for changes, which another tab may lack"
    assert former.ask("GET", "/v1/cluster")[0] == 401
    assert browser.ask("GET", "/v1/cluster")[0] == 200


def test_sessions_outlast_a_restart_until_signing_out(tmp_path: Path) -> None:
    """What is in the data folder is of no use without the cookie, and the other way round."""
    with running(tmp_path, environment={"NATSLOG_SECURITY": "true"}) as (_, broker):
        token = eventually(lambda: [one for one in broker.output().splitlines() if one.startswith("nlt_")])[0]
        stays, leaves = Browser(broker), Browser(broker)
        assert {one.sign_in(token) for one in (stays, leaves)} == {201}
        cookies = [one.cookie.split("=", 1)[1] for one in (stays, leaves)]
        kept = broker.folder / "sessions.json"
        assert not any(secret in kept.read_text() for secret in (*cookies, token.split("_", 2)[2], stays.csrf))
        old = leaves.cookie
        assert leaves.ask("DELETE", "/v1/session", Natslog_Csrf=leaves.csrf)[0] == 204
        broker.terminate()
        broker.start()
        leaves.cookie = old
        assert leaves.ask("GET", "/v1/cluster")[0] == 401
        assert stays.ask("GET", "/v1/cluster")[0] == 200
        stream = {"name": "s", "subject": "s"}
        assert stays.ask("POST", "/v1/streams", stream, Natslog_Csrf=stays.csrf)[0] == 201
        broker.terminate()
        kept.write_bytes(kept.read_bytes()[:-3])
        broker.start()
        assert stays.ask("GET", "/v1/cluster")[0] == 401
        assert "users of the console must sign in again" in broker.output()


def test_a_session_that_was_ended_does_not_come_back_where_the_file_cannot_be_written(tmp_path: Path) -> None:
    with running(tmp_path, environment={"NATSLOG_SECURITY": "true"}) as (_, broker):
        token = eventually(lambda: [one for one in broker.output().splitlines() if one.startswith("nlt_")])[0]
        ended = Browser(broker)
        ended.sign_in(token)
        (broker.folder / "sessions.json.new").mkdir()
        cookie = ended.cookie
        assert ended.ask("DELETE", "/v1/session", Natslog_Csrf=ended.csrf)[0] == 204
        assert "a restart ends the sessions of the console" in broker.output()
        broker.terminate()
        broker.start()
        ended.cookie = cookie
        assert ended.ask("GET", "/v1/cluster")[0] == 401


def test_signing_out_fails_as_long_as_the_session_would_come_back(tmp_path: Path) -> None:
    """The file can neither be replaced nor removed: in its place there is a folder with something in it."""
    with running(tmp_path, environment={"NATSLOG_SECURITY": "true"}) as (_, broker):
        token = eventually(lambda: [one for one in broker.output().splitlines() if one.startswith("nlt_")])[0]
        user = Browser(broker)
        user.sign_in(token)
        kept = broker.folder / "sessions.json"
        kept.rename(kept.with_suffix(".aside"))
        (kept / "something").mkdir(parents=True)
        for _ in range(2):  # the second time as well, although it is signed out here
            status, found = user.ask("DELETE", "/v1/session", Natslog_Csrf=user.csrf)
            assert (status, found["error"]["code"]) == (503, "file_unavailable")
        (kept / "something").rmdir()
        kept.rmdir()
        assert user.ask("DELETE", "/v1/session", Natslog_Csrf=user.csrf)[0] == 204


def test_a_cookie_that_is_no_text_is_none(secured: tuple[BrokerProcess, str], browser: Browser) -> None:
    browser.cookie = f"natslog_session_{secured[0].http_port}=a\xff"
    assert browser.ask("GET", "/v1/cluster")[0] == 401


def test_a_sign_in_is_recorded_with_the_identity(secured: tuple[BrokerProcess, str], browser: Browser) -> None:
    broker, token = secured
    browser.sign_in(token)
    lines = [line.split(": ", 1)[1] for line in broker.output().splitlines() if " natslog.audit: " in line]
    signed_in = [fact for fact in map(json.loads, lines) if fact.get("path") == "/v1/session"]
    assert signed_in[-1]["identity"] == "admin"
    assert signed_in[-1]["token"] == token.split("_", 2)[1]


def test_without_security_browsers_must_use_a_name_of_the_broker(tmp_path: Path) -> None:
    """A page of another site whose name was made to point here could read and change everything (DNS rebinding)."""
    with running(tmp_path / "data") as (_, broker):
        port, program = broker.http_port, Browser(broker)
        evil = {"Host": f"evil.example:{port}"}
        agent = {"User_Agent": "Mozilla/5.0"}
        own = (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", f"{socket.gethostname()}:{port}")
        for browser in (agent, {"Accept_Language": "en"}, {"Origin": f"http://evil.example:{port}"}):
            assert program.ask("GET", "/v1/streams", **(evil | browser))[0] == 403
            assert program.ask("POST", "/v1/streams", {"name": "a", "subject": "a"}, **(evil | browser))[0] == 403
        for host in own:
            assert program.ask("GET", "/v1/streams", Host=host, **agent)[0] == 200
        for headers in ({}, {"Accept_Language": "*", "User_Agent": "node", "Sec_Fetch_Mode": "cors"}):
            assert program.ask("GET", "/v1/streams", **evil, **headers)[0] == 200, "programs may use any name"


def test_pages_of_other_sites_change_nothing(browser: Browser, token: str) -> None:
    """Also where no credentials are needed, a page that a user of this machine opens must not be able to."""
    host = f"127.0.0.1:{browser._broker.http_port}"
    admin = {"Authorization": f"Bearer {token}"}
    body = {"name": "crossed", "subject": "crossed"}
    for origin in ("https://example.com", "http://127.0.0.1:1", "null", f"https://{host}"):
        status, error = browser.ask("POST", "/v1/streams", body, Origin=origin, **admin)
        assert (status, "not a page of this broker" in error["error"]["message"]) == (403, True)
    assert browser.ask("GET", "/v1/streams", Origin="https://example.com", **admin)[0] == 200
    assert browser.ask("POST", "/v1/streams", body, Origin=f"http://{host}", **admin)[0] == 201
    assert browser.ask("DELETE", "/v1/streams/crossed", **admin)[0] == 204, "programs state no origin"
