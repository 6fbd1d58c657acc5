"""Every call of the API by every kind of identity: what is permitted, and what is refused.

The calls are those of the server (`ROUTES`); what each needs is written here once more, by hand, so that a call whose
declaration is wrong, or that is new, fails the test. docs/GUARANTEES.md states the size of the table.
"""

from __future__ import annotations

import http.client
import json
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from aiohttp import web

from natslog.client import ClientOptions, NatslogClient
from natslog.client.appending import PartUploader
from natslog.client.publisher import Publisher, Rows
from natslog.errors import Forbidden
from natslog.http.app import ROUTES
from natslog.node.peers.handshake import LINK_PATH
from natslog.sql import connect
from tests.harness import BrokerProcess, eventually, publish_acked, running

STREAM, SUBJECT = "orders", "orders.>"

# What a call needs: "open", "peers", "credentials", an action on everything ("all:ACTION"), or on the stream ("ACTION";
# "see": any action; "read:all": on all of its subjects).
NEEDS = {
    "GET /healthz": "open",
    "GET /readyz": "open",
    "GET /openapi.json": "open",
    "GET /": "open",
    "GET /console/{path}": "open",
    "GET /v1/session": "open",
    "POST /v1/session": "open",
    "DELETE /v1/session": "open",
    "GET /v1/overview": "all:monitor",
    "GET /v1/live": "all:monitor",
    "GET /v1/history": "all:monitor",
    "GET /metrics": "all:monitor",
    f"GET {LINK_PATH}": "peers",
    f"POST {LINK_PATH}": "peers",
    "GET /v1/cluster": "credentials",
    "GET /v1/cluster/plan": "all:monitor",
    "POST /v1/cluster/brokers": "all:admin",
    "PATCH /v1/cluster/brokers/{id}": "all:admin",
    "DELETE /v1/cluster/brokers/{id}": "all:admin",
    "POST /v1/cluster/transfer": "all:admin",
    "GET /v1/cluster/log-level": "all:admin",
    "PUT /v1/cluster/log-level": "all:admin",
    "POST /v1/cluster/finalize-upgrade": "all:admin",
    "POST /v1/streams/{name}/leader": "admin",
    "PUT /v1/streams/{name}/replicas": "admin",
    "GET /v1/streams": "credentials",
    "POST /v1/streams": "manage",
    "GET /v1/streams/{name}": "see",
    "PATCH /v1/streams/{name}": "manage",
    "DELETE /v1/streams/{name}": "manage",
    "POST /v1/streams/{name}/roll": "manage",
    "GET /v1/streams/{name}/scrub": "see",
    "POST /v1/streams/{name}/scrub": "manage",
    "POST /v1/streams/{name}/repair": "manage",
    "POST /v1/streams/{name}/purge": "manage",
    "GET /v1/streams/{name}/erase": "manage",
    "POST /v1/streams/{name}/erase": "manage",
    "GET /v1/streams/{name}/removed": "read:all",
    "DELETE /v1/streams/{name}/messages/{offset}": "manage",
    "POST /v1/streams/{name}/seal": "manage",
    "GET /v1/streams/{name}/search": "read",
    "POST /v1/streams/{name}/publish": "publish",
    "POST /v1/streams/{name}/redrive": "read",
    "GET /v1/streams/{name}/segments": "read:all",
    "GET /v1/streams/{name}/replicas": "see",
    "GET /v1/streams/{name}/subjects": "read",
    "GET /v1/streams/{name}/offsets": "read",
    "GET /v1/streams/{name}/extent": "read",
    "GET /v1/streams/{name}/tail": "read",
    "GET /v1/streams/{name}/splits": "read",
    "GET /v1/streams/{name}/messages": "read",
    "GET /v1/streams/{name}/lag": "read",
    "POST /v1/positions": "read",
    "POST /v1/splits": "read",
    "POST /v1/plans": "read",
    "POST /v1/lags": "read",
    "GET /v1/cursors": "credentials",
    "POST /v1/cursors": "cursor",
    "GET /v1/cursors/{consumer}/{stream}": "see",
    "PUT /v1/cursors/{consumer}/{stream}": "cursor",
    "DELETE /v1/cursors/{consumer}/{stream}": "cursor",
    "PUT /v1/streams/{name}/appends/{producer}/{batch}/parts/{part}": "publish",
    "POST /v1/streams/{name}/appends/{producer}/{batch}": "publish",
    "DELETE /v1/streams/{name}/appends/{producer}/{batch}": "publish",
    "POST /v1/streams/{name}/appends/{producer}/{batch}/rows": "publish",
    "GET /v1/streams/{name}/appends": "publish",
    "GET /v1/streams/{name}/appends/{producer}": "publish",
    "GET /v1/streams/{name}/import": "all:admin",
    "POST /v1/streams/{name}/import": "all:admin",
    "PUT /v1/streams/{name}/import": "all:admin",
    "POST /v1/streams/{name}/import/removed": "all:admin",
    "POST /v1/streams/{name}/import/consumers": "all:admin",
    "POST /v1/streams/{name}/import/finish": "all:admin",
    "GET /v1/security": "all:admin",
    "POST /v1/security": "all:admin",
    "GET /v1/whoami": "credentials",
    "GET /v1/tokens": "all:admin",
    "POST /v1/tokens": "all:admin",
    "DELETE /v1/tokens/{token}": "all:admin",
    "GET /v1/acl": "all:admin",
    "POST /v1/acl": "all:admin",
    "DELETE /v1/acl/{rule}": "all:admin",
    "GET /v1/acl/check": "credentials",
    "GET /v1/roles": "all:admin",
    "PUT /v1/roles/{role}": "all:admin",
    "DELETE /v1/roles/{role}": "all:admin",
    "GET /v1/quotas": "all:admin",
    "PUT /v1/quotas": "all:admin",
    "DELETE /v1/quotas": "all:admin",
}

IN_PATH = {
    "name": STREAM,
    "stream": STREAM,
    "consumer": "c",
    "producer": "p",
    "batch": "0",
    "part": "a",
    "role": "x",
    "offset": "0",
    "path": "app.js",
}
BODIES: dict[str, Any] = {
    "POST /v1/streams": {"name": STREAM, "subject": SUBJECT},
    "POST /v1/positions": {"streams": [STREAM]},
    "POST /v1/splits": {"ranges": [{"stream": STREAM, "id": "0", "start": 0, "end": 1}]},
    "POST /v1/plans": {"streams": [STREAM]},
    "POST /v1/lags": {STREAM: 0},
    "POST /v1/streams/{name}/publish": {"subject": SUBJECT, "value": "x"},
    "POST /v1/streams/{name}/redrive": {"offsets": [0], "dry_run": True},
    "PUT /v1/cursors/{consumer}/{stream}": {"offset": 0},
    "POST /v1/cursors": {"cursors": [{"consumer": "c", "stream": STREAM, "offset": 0}]},
}
OWN_ACTIONS = ("read", "publish", "manage", "cursor")

IDENTITIES = {
    "none": "no credentials",
    "wrong": "a token that never existed",
    "expired": "an expired token",
    "revoked": "a revoked token",
    "nothing": "a token without any rule",
    "reader": "may read the stream",
    "publisher": "may publish to the stream",
    "manager": "may manage the stream",
    "other-stream": "may do all of this to another stream",
    "part": "may do all of this on some subjects of the stream",
    "other-subject": "may do all of this on subjects that the stream does not record",
    "monitor": "may read metrics",
    "admin": "may do everything",
}


def permitted(identity: str, needed: str) -> bool:
    """Whether the identity may make a call that needs this."""
    if needed in ("open", "peers"):
        return needed == "open"
    match identity:
        case "none" | "wrong" | "expired" | "revoked":
            return False
        case "admin":
            return True
        case "reader":
            return needed in ("credentials", "see", "read", "read:all")
        case "publisher":
            return needed in ("credentials", "see", "publish")
        case "manager":
            return needed in ("credentials", "see", "manage")
        case "part":
            return needed in ("credentials", "see", "read", "publish", "cursor")
        case "monitor":
            return needed in ("credentials", "see", "all:monitor")
        case _:
            return needed == "credentials"


@dataclass
class Secured:
    """A broker with security, and a token of each identity."""

    broker: BrokerProcess
    tokens: dict[str, str | None]

    def ask(
        self,
        call: str,
        identity: str = "admin",
        *,
        query: str = "",
        body: Any = None,
        path: dict[str, str] | None = None,
    ) -> tuple[int, Any, dict[str, str]]:
        method, pattern = call.split(" ")
        token = self.tokens[identity]
        given = BODIES.get(call) if body is None else body
        connection = http.client.HTTPConnection("127.0.0.1", self.broker.http_port, timeout=30)
        try:
            connection.request(
                method,
                pattern.format(**(IN_PATH | {"id": "999", "token": "999", "rule": "r999"} | (path or {}))) + query,
                body=None if given is None else json.dumps(given),
                headers={} if token is None else {"Authorization": f"Bearer {token}"},
            )
            answer = connection.getresponse()
            is_endless = answer.getheader("Content-Type") == "text/event-stream"
            data = b"" if is_endless else answer.read()
        finally:
            connection.close()
        is_json = (answer.getheader("Content-Type") or "").startswith("application/json")
        return answer.status, json.loads(data) if is_json and data else data, dict(answer.getheaders())


def admin_token(broker: BrokerProcess) -> str:
    """As the first start printed it."""

    def printed() -> list[str]:
        return [line for line in broker.output().splitlines() if line.startswith("nlt_")]

    return eventually(printed, what="it is printed when the broker is ready")[0]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("access")
    with running(folder, environment={"NATSLOG_SECURITY": "true"}) as (server, broker):
        found = Secured(broker, {"admin": admin_token(broker), "none": None, "wrong": f"nlt_{'0' * 12}_{'A' * 43}"})
        for name in IDENTITIES:
            if name not in found.tokens:
                body = {"identity": name, "expires": "1s" if name == "expired" else "1h"}
                status, created, _ = found.ask("POST /v1/tokens", body=body)
                assert status == 201
                found.tokens[name] = created["token"]
                if name == "revoked":
                    assert found.ask("DELETE /v1/tokens/{token}", path={"token": created["id"]})[0] == 204
        rules = [("reader", "read", STREAM, ">"), ("publisher", "publish", STREAM, ">")]
        rules += [("manager", "manage", STREAM, ">"), ("monitor", "monitor", "*", ">")]
        for action in OWN_ACTIONS:
            rules += [("other-stream", action, "other", ">"), ("part", action, STREAM, "orders.eu.>")]
            rules += [("other-subject", action, STREAM, "returns.>")]
        for who, action, stream, subject in rules:
            rule = {"who": who, "action": action, "stream": stream, "subject": subject}
            assert found.ask("POST /v1/acl", body=rule)[0] == 201
        assert found.ask("POST /v1/streams")[0] == 201
        publish_acked(server.url, "orders.eu.a", [b"mine"] * 3)
        publish_acked(server.url, "orders.us.b", [b"theirs"] * 3)
        eventually(lambda: found.ask("GET /v1/whoami", "expired")[0] == 401, what="the token expires")
        yield found


def calls() -> list[str]:
    defined = [route for route in ROUTES if isinstance(route, web.RouteDef)]
    return [f"{route.method} {re.sub(r':[^}]*', '', route.path)}" for route in defined]


def test_every_call_of_the_server_is_in_the_table() -> None:
    assert sorted(calls()) == sorted(NEEDS)


def test_every_call_by_every_identity_is_permitted_or_refused_as_the_table_says(
    secured: Secured, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, seen = [], Counter[str]()
    for call, needed in NEEDS.items():
        if needed == "peers":
            continue
        for identity in IDENTITIES:
            assert secured.ask("POST /v1/streams")[0] in (200, 201), "a permitted call may have deleted it"
            status, body, _ = secured.ask(call, identity)
            is_refused = status in (401, 403)
            expected = 401 if identity in ("none", "wrong", "expired", "revoked") else 403
            seen["refused" if is_refused else "permitted"] += 1
            if is_refused == permitted(identity, needed) or (is_refused and status != expected) or status >= 500:
                wrong.append((call, identity, status, body))
    with capsys.disabled():
        print(f"\naccess table: {len(NEEDS)} calls, {len(IDENTITIES)} identities, {dict(seen)}")
    assert not wrong


def test_a_refusal_says_what_to_do_and_changes_nothing(secured: Secured) -> None:
    status, body, headers = secured.ask("GET /v1/streams", "none")
    assert status == 401
    assert headers["WWW-Authenticate"].startswith("Bearer")
    assert "token" in body["error"]["message"]
    status, body, _ = secured.ask("DELETE /v1/streams/{name}", "reader")
    assert status == 403
    assert "natslog acl add reader manage orders" in body["error"]["message"]
    assert secured.ask("GET /v1/streams/{name}")[0] == 200


@pytest.mark.parametrize("identity", IDENTITIES)
def test_the_link_between_brokers_is_not_reached_with_any_credentials(secured: Secured, identity: str) -> None:
    status, body, _ = secured.ask(f"POST {LINK_PATH}", identity, body={"cluster_id": "x"})
    assert status in (400, 403)
    assert body["error"]["code"] in ("cluster_mismatch", "invalid_request")
    assert secured.ask(f"GET {LINK_PATH}", identity)[0] in (400, 403, 426)


def test_lists_show_only_streams_on_which_something_is_permitted(secured: Secured) -> None:
    secured.ask("POST /v1/streams", body={"name": "other", "subject": "other"})
    for identity, names in (("reader", ["orders"]), ("other-stream", ["other"]), ("admin", ["orders", "other"])):
        assert [one["name"] for one in secured.ask("GET /v1/streams", identity)[1]] == names
        assert [one["name"] for one in secured.ask("POST /v1/positions", identity, body={})[1]] == names
    assert secured.ask("GET /v1/streams", "other-subject")[1] == []
    assert secured.ask("POST /v1/positions", "other-subject", body={})[1] == []


def rows_of(secured: Secured, identity: str, query: str = "") -> list[dict[str, Any]]:
    """As lines of JSON."""
    token = secured.tokens[identity]
    connection = http.client.HTTPConnection("127.0.0.1", secured.broker.http_port, timeout=30)
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/x-ndjson"}
    connection.request("GET", f"/v1/streams/{STREAM}/messages?start=0{query}", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 200
    lines = [json.loads(line) for line in answer.read().splitlines()]
    connection.close()
    return lines


def test_an_identity_limited_to_subjects_is_sent_their_rows_only_and_no_counts(secured: Secured) -> None:
    create_again(secured)
    for query in ("", "&subject=orders.%3E", "&subject=orders.eu.a", "&end=6", "&exact=false", "&max_bytes=1000000"):
        assert {row["subject"] for row in rows_of(secured, "part", query)} == {"orders.eu.a"}, query
    assert rows_of(secured, "part", "&subject=orders.us.%3E") == []
    assert {row["subject"] for row in rows_of(secured, "reader")} == {"orders.eu.a", "orders.us.b"}
    status, stream, _ = secured.ask("GET /v1/streams/{name}", "part")
    assert (status, stream["high_watermark"], stream["bytes"], stream["segments"]) == (200, 6, None, None)
    assert secured.ask("GET /v1/streams/{name}", "reader")[1]["bytes"] > 0
    for call, query in (("lag", "?offset=0"), ("extent", ""), ("splits", "")):
        status, found, _ = secured.ask(f"GET /v1/streams/{{name}}/{call}", "part", query=query)
        one = found[0] if isinstance(found, list) else found
        assert status == 200
        assert one["bytes"] is None, call
        assert one.get("rows") is None, call
    assert secured.ask("POST /v1/lags", "part")[1][STREAM]["rows"] is None
    assert secured.ask("POST /v1/positions", "part")[1][0]["bytes"] is None
    for identity, is_known in (("part", False), ("reader", True)):
        plan = secured.ask("POST /v1/plans", identity)[1]
        ((planned,),) = plan["tasks"]
        stated = [plan["streams"][STREAM]["rows"], planned["rows"], planned["bytes"]]
        assert [one is not None for one in stated] == [is_known] * 3


def test_a_plan_tells_nothing_of_streams_that_may_not_be_read(secured: Secured) -> None:
    at = {"id": "0", "start": 0}
    for identity, status in (("reader", 200), ("nothing", 403)):
        body = {"streams": [], "positions": {STREAM: at}}
        answer = secured.ask("POST /v1/plans", identity, body=body)
        assert answer[0] == status
        assert status == 403 or answer[1]["others"] == {STREAM: "exists"}
    assert secured.ask("POST /v1/plans", "other-subject", body={})[1]["streams"] == {}


def test_a_query_sees_only_streams_and_messages_that_may_be_read(secured: Secured) -> None:
    create_again(secured)
    query = f"SELECT subject, count(*) FROM {STREAM} GROUP BY 1 ORDER BY 1"
    seen = {}
    for identity in ("reader", "part", "other-subject", "admin"):
        with NatslogClient(secured.broker.url, ClientOptions(token=secured.tokens[identity])) as client:
            connection = connect(client)
            tables = [row[0] for row in connection.sql("SHOW TABLES").fetchall()]
            seen[identity] = (STREAM in tables, "__activity" in tables)
            if STREAM in tables:
                subjects = [row[0] for row in connection.sql(query).fetchall()]
                assert subjects == ["orders.eu.a"] + ["orders.us.b"] * (identity != "part")
    assert seen == {
        "reader": (True, False),
        "part": (True, False),
        "other-subject": (False, False),
        "admin": (True, True),
    }


@pytest.mark.long
def test_large_batches_are_sent_whole_or_filtered_row_by_row(secured: Secured) -> None:
    """Batches of which all, some and no rows are permitted; all columns and some; from the start and from within."""
    create_again(secured)
    for part in ("eu", "us", "both", "eu", "us"):
        regions = [part] * 4000 if part != "both" else ["eu", "us"] * 2000
        with Publisher(secured.broker.nats_url) as publisher:
            subjects = pa.array([f"orders.{region}.{number % 3}" for number, region in enumerate(regions)])
            values = pa.array([b"%d" % number * 20 for number in range(4000)], pa.binary())
            publisher.publish(Rows(subjects, values), "stored")
    everything = read_as(secured, "reader", 0)
    permitted = pc.starts_with(everything.column("subject"), "orders.eu.")
    for start in (0, 1000, 4003, 9000, 15_000):
        expected = everything.filter(pc.and_(permitted, pc.greater_equal(everything.column("offset"), start)))
        assert read_as(secured, "part", start).equals(expected)
        found = read_as(secured, "part", start, columns=("offset", "subject"))
        assert found.equals(expected.select(["offset", "subject"]))


def read_as(secured: Secured, identity: str, start: int, **options: Any) -> pa.Table:
    with NatslogClient(secured.broker.url, ClientOptions(token=secured.tokens[identity])) as client:
        return pa.Table.from_batches(client.read(STREAM, start, **options)).combine_chunks()


def test_an_identity_limited_to_subjects_is_listed_only_these(secured: Secured) -> None:
    create_again(secured)
    for identity, expected in (("part", ["orders.eu.a"]), ("reader", ["orders.eu.a", "orders.us.b"])):
        for query in ("", "?pattern=orders.%3E"):
            status, page, _ = secured.ask("GET /v1/streams/{name}/subjects", identity, query=query)
            assert (status, page.get("total")) == (200, len(expected)), (identity, query, page)
            assert [one["subject"] for one in page["subjects"]] == expected
    status, page, _ = secured.ask("GET /v1/streams/{name}/subjects", "part", query="?pattern=orders.us.%3E")
    assert (status, page["total"], page["subjects"]) == (200, 0, [])
    for identity, count in (("part", 0), ("reader", 3)):
        _, page, _ = secured.ask("GET /v1/streams/{name}/subjects", identity, query="?pattern=orders.us.b")
        assert sum(one["count"] for one in page["subjects"]) == page["total"] * 3 == count
        _, found, _ = secured.ask("GET /v1/streams/{name}/offsets", identity, query="?subject=orders.us.b")
        assert (found["timestamp"] is not None) == (count > 0)


def test_a_message_is_published_only_to_streams_that_the_identity_may_publish_to(secured: Secured) -> None:
    """It reaches all streams that record its subject, also those that the request does not name."""
    assert secured.ask("POST /v1/streams", body={"name": "beside", "subject": SUBJECT})[0] in (200, 201)
    try:
        message = {"subject": SUBJECT.replace(">", "x"), "value": "x"}
        status, body, _ = secured.ask("POST /v1/streams/{name}/publish", "publisher", body=message)
        assert status == 403
        assert "beside" in body["error"]["message"]
    finally:
        secured.ask("DELETE /v1/streams/{name}", path={"name": "beside"})


def test_a_search_finds_only_messages_that_may_be_read(secured: Secured) -> None:
    create_again(secured)
    for identity, expected in (("part", ["mine"] * 3), ("reader", ["mine"] * 3 + ["theirs"] * 3)):
        for query in ("", "?grep=e", "?newest=6", "?grep=%28mine%7Ctheirs%29&regex=true"):
            status, page, _ = secured.ask("GET /v1/streams/{name}/search", identity, query=query)
            assert (status, [one["value"] for one in page["messages"]]) == (200, expected), (identity, query)
            assert ("rows_searched" in page) == ("bytes_searched" in page) == (identity == "reader")
    _, page, _ = secured.ask("GET /v1/streams/{name}/search", "part", query="?subject=orders.us.%3E")
    assert page["messages"] == []


def create_again(secured: Secured) -> None:
    """The stream with three messages on each of two subjects."""
    secured.ask("DELETE /v1/streams/{name}")
    assert secured.ask("POST /v1/streams")[0] == 201
    publish_acked(secured.broker.nats_url, "orders.eu.a", [b"mine"] * 3)
    publish_acked(secured.broker.nats_url, "orders.us.b", [b"theirs"] * 3)


def test_messages_from_before_an_edit_of_the_subject_stay_limited(secured: Secured) -> None:
    """The stream records only what the identity may read now, but it has recorded more."""
    create_again(secured)
    assert secured.ask("PATCH /v1/streams/{name}", body={"subject": "orders.eu.>"})[0] == 200
    assert {row["subject"] for row in rows_of(secured, "part")} == {"orders.eu.a"}
    assert secured.ask("DELETE /v1/streams/{name}", "part")[0] == 403
    create_again(secured)


def test_a_stream_of_other_subjects_cannot_be_created_or_edited_to_record_them(secured: Secured) -> None:
    wanted = {"name": STREAM, "subject": "payments.>"}
    status, body, _ = secured.ask("POST /v1/streams", "part", body=wanted)
    assert status == 403
    assert "only on the subjects orders.eu.>, not on payments.>" in body["error"]["message"]
    assert "orders --subject 'payments.>'" in body["error"]["message"]
    assert secured.ask("POST /v1/streams", "part", body=wanted | {"subject": ">", "acks": "never"})[0] == 403
    assert secured.ask("POST /v1/acl", body={"who": "owner", "action": "manage", "stream": "own-*", "subject": "own.>"})
    status, created, _ = secured.ask("POST /v1/tokens", body={"identity": "owner"})
    secured.tokens["owner"] = created["token"]
    assert secured.ask("POST /v1/streams", "owner", body={"name": "own-1", "subject": "own.a"})[0] == 201
    assert secured.ask("PATCH /v1/streams/{name}", "owner", path={"name": "own-1"}, body={"subject": "own.*"})[0] == 200
    status, _, _ = secured.ask("PATCH /v1/streams/{name}", "owner", path={"name": "own-1"}, body={"subject": "pay"})
    assert status == 403
    assert secured.ask("DELETE /v1/streams/{name}", "owner", path={"name": "own-1"})[0] == 204


def test_every_subject_of_a_stream_must_be_permitted(secured: Secured) -> None:
    body = {"who": "several", "action": "manage", "stream": "several-*", "subject": "several.>"}
    assert secured.ask("POST /v1/acl", body=body)[0] == 201
    secured.tokens["several"] = secured.ask("POST /v1/tokens", body={"identity": "several"})[1]["token"]
    path = {"name": "several-1"}
    both = {"subjects": ["several.a", "several.b.>"]}
    status, refused, _ = secured.ask("POST /v1/streams", "several", body=path | {"subjects": ["several.a", "pay.b"]})
    assert (status, "not on pay.b" in refused["error"]["message"]) == (403, True)
    assert secured.ask("POST /v1/streams", "several", body=path | both)[0] == 201
    edit = "PATCH /v1/streams/{name}"
    assert secured.ask(edit, "several", path=path, body={"subjects": ["several.a", "pay.b"]})[0] == 403
    assert secured.ask(edit, "several", path=path, body={"subjects": ["several.c", "several.a"]})[0] == 200
    assert secured.ask(edit, path=path, body={"subjects": ["several.c", "pay.b"]})[0] == 200
    assert secured.ask(edit, path=path, body={"subject": "several.c"})[0] == 200
    assert secured.ask("DELETE /v1/streams/{name}", "several", path=path)[0] == 403, "it has recorded pay.b"
    assert secured.ask("DELETE /v1/streams/{name}", path=path)[0] == 204


def test_the_check_names_the_rule_that_decides(secured: Secured) -> None:
    query = "?identity=part&action=read&stream=orders"
    status, found, _ = secured.ask("GET /v1/acl/check", query=query + "&subject=orders.eu.x")
    assert (status, found["allowed"], found["rule"]["who"], found["rule"]["subject"]) == (
        200,
        True,
        "part",
        "orders.eu.>",
    )
    found = secured.ask("GET /v1/acl/check", query=query)[1]
    assert (found["allowed"], found["allowed_subjects"], found["rule"]) == (False, ["orders.eu.>"], None)
    assert secured.ask("GET /v1/acl/check", "part", query="?identity=admin&action=read&stream=orders")[0] == 403
    assert secured.ask("GET /v1/acl/check", "part", query="?action=read&stream=orders")[0] == 200


def test_the_last_rule_of_an_administrator_cannot_be_removed(secured: Secured) -> None:
    assert secured.ask("DELETE /v1/acl/{rule}", path={"rule": "r1"})[0] == 409
    assert secured.ask("DELETE /v1/roles/{role}", path={"role": "admin"}, query="?identity=admin")[0] == 409
    assert secured.ask("GET /v1/tokens")[0] == 200


def polls(secured: Secured) -> float:
    """How many requests for messages the broker has received."""
    return metric(secured, 'natslog_http_requests_total{path="/v1/streams/{name}/messages"}')


def metric(secured: Secured, name: str) -> float:
    lines = secured.ask("GET /metrics")[1].decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} "))


def test_refused_requests_are_counted(secured: Secured) -> None:
    before = metric(secured, "natslog_http_requests_refused_total")
    secured.ask("GET /v1/streams", "none")
    assert metric(secured, "natslog_http_requests_refused_total") == before + 1


def test_a_repeated_request_for_a_token_never_returns_a_token_that_is_not_valid(secured: Secured) -> None:
    answers = []
    for _ in range(2):
        connection = http.client.HTTPConnection("127.0.0.1", secured.broker.http_port, timeout=30)
        headers = {"Authorization": f"Bearer {secured.tokens['admin']}", "Natslog-Request-Id": "the-same-request-1"}
        connection.request("POST", "/v1/tokens", body=json.dumps({"identity": "twice"}), headers=headers)
        answer = connection.getresponse()
        assert answer.getheader("Natslog-Request-Id") == "the-same-request-1"
        answers.append((answer.status, json.loads(answer.read())))
        connection.close()
    assert [status for status, _ in answers] == [201, 409]
    assert answers[0][1]["id"] in answers[1][1]["error"]["message"]


def test_what_is_needed_for_a_long_poll_is_checked_again_while_it_waits(secured: Secured) -> None:
    """A rule that is removed, and a token that is revoked, end it within 5 s."""
    create_again(secured)
    for how in ("rule", "token"):
        _, created, _ = secured.ask("POST /v1/tokens", body={"identity": "poller"})
        _, rule, _ = secured.ask("POST /v1/acl", body={"who": "poller", "action": "read", "stream": STREAM})
        secured.tokens["poller"] = created["token"]
        connection = http.client.HTTPConnection("127.0.0.1", secured.broker.http_port, timeout=30)
        headers = {"Authorization": f"Bearer {created['token']}"}
        before = polls(secured)
        connection.request("GET", f"/v1/streams/{STREAM}/messages?start=6&wait_ms=30000", headers=headers)
        eventually(lambda before=before: polls(secured) > before, what="the poll has come")
        started = time.monotonic()
        if how == "rule":
            assert secured.ask("DELETE /v1/acl/{rule}", path={"rule": rule["id"]})[0] == 204
        else:
            assert secured.ask("DELETE /v1/tokens/{token}", path={"token": created["id"]})[0] == 204
        answer = connection.getresponse()
        assert answer.status == (403 if how == "rule" else 401)
        assert time.monotonic() - started < 5
        connection.close()


def test_what_one_may_not_read_is_in_no_count_and_no_status(secured: Secured) -> None:
    shown = secured.ask("GET /v1/streams/{name}", "part")[1]
    assert shown["messages"] is None
    listed = secured.ask("GET /v1/streams", "part")[1]
    assert [one["messages"] for one in listed if one["name"] == STREAM] == [None]
    (stated,) = secured.ask("POST /v1/positions", "part")[1]
    assert stated.get("messages") is None
    for identity in ("nothing", "reader", "part"):
        answers = set()
        for name in ("missing", "other"):  # `other` has rules, and does not exist; the stream of the test does
            body = {"cursors": [{"consumer": "c", "stream": name, "offset": 0}]}
            answers.add(secured.ask("POST /v1/cursors", identity, body=body)[0])
        if identity == "nothing":
            answers.add(secured.ask("POST /v1/cursors", identity)[0])
        assert answers == {403}, identity
    counted = secured.ask("GET /v1/cluster", "other-subject")[1]
    assert counted["streams"] == 0
    assert [one["replicas"] for one in counted["brokers"]] == [0]
    assert secured.ask("GET /v1/cluster", "reader")[1]["streams"] == 1
    assert secured.ask("GET /v1/cluster", "monitor")[1]["streams"] >= 1


@pytest.mark.long
def test_every_call_that_takes_a_body_is_paid_for_by_its_identity(secured: Secured) -> None:
    """Those that the server describes, so also those that are added later."""
    described = secured.ask("GET /openapi.json")[1]["paths"]
    taking = [
        f"{method.upper()} {path}"
        for path, methods in described.items()
        for method, call in methods.items()
        if "requestBody" in call and NEEDS.get(f"{method.upper()} {path}") not in ("open", "peers")
    ]
    assert len(taking) > 25
    unpaid = []
    for number, call in enumerate(taking):
        name = f"paying-{number}"
        created = secured.ask("POST /v1/tokens", body={"identity": name, "roles": ["admin"]})[1]
        secured.tokens[name] = created["token"]
        quota = {"bytes_in_per_s": 64 * 1024}
        assert secured.ask("PUT /v1/quotas", body=quota, query=f"?identity={name}")[0] == 200
        started = time.monotonic()
        for _ in range(3):  # more than two seconds' worth, which are free
            status, _, _ = secured.ask(call, name, body={"unknown": "x" * 62_000})
            assert status >= 400, call
        assert secured.ask("GET /v1/whoami", name)[0] == 200
        if time.monotonic() - started < 0.5:
            unpaid.append(call)
    assert unpaid == []


def test_the_audit_log_has_changes_and_refusals_and_no_secrets(secured: Secured) -> None:
    secured.ask("POST /v1/streams", "none", body={"name": "x\n2026 forged", "subject": "x"})
    secured.ask("GET /v1/streams/{name}", "nothing", path={"name": "a%1B%5B2Jb"})
    lines = [
        line.split("natslog.audit: ", 1)[1] for line in secured.broker.output().splitlines() if "natslog.audit" in line
    ]
    events = [json.loads(line) for line in lines]
    assert {"change", "refused"} <= {event["event"] for event in events} <= {"change", "refused", "unauthenticated"}
    of_requests = [event for event in events if "created_token" not in event or event["identity"]]
    assert len(of_requests) == len(events) - 1, "the first token was created by the start"
    keys = {"time", "identity", "from", "method", "path", "status", "request_id"}
    assert all(keys <= set(event) for event in of_requests)
    assert any(event["identity"] == "admin" and event["route"] == "/v1/tokens" for event in events)
    assert not any("\x1b" in line for line in lines)
    tokens = [token for name, token in secured.tokens.items() if token and name != "admin"]
    assert not any(secret in secured.broker.output() for secret in tokens)


def test_a_request_that_names_very_many_streams_does_not_stop_others(secured: Secured) -> None:
    """Names that do not exist are looked up in the rules, each of them."""
    identity_with(secured, "many", ("read", "orders*", ">"))
    for call, body in (
        ("POST /v1/positions", {"streams": [f"orders{number}" for number in range(100_000)]}),
        ("POST /v1/plans", {"positions": {f"orders{at}": {"id": "a", "start": 0} for at in range(80_000)}}),
        (
            "POST /v1/splits",
            {"ranges": [{"stream": f"orders{number}", "id": "0", "start": 0, "end": 1} for number in range(30_000)]},
        ),
        ("POST /v1/lags", {f"orders{number}": 0 for number in range(2_000)}),
    ):
        status, answer, _ = secured.ask(call, "many", body=body)
        assert (status, answer["error"]["code"]) == (400, "invalid_request"), call
        assert secured.ask(call, "reader", body=body)[0] == 403
    assert secured.ask("POST /v1/positions", "reader", body={"streams": ["x" * 1_000_000]})[0] == 403
    assert secured.ask("POST /v1/positions", "reader", body={"streams": [STREAM]})[0] == 200


def identity_with(secured: Secured, name: str, *rules: tuple[str, str, str]) -> list[str]:
    """Creates an identity and its rules (action, stream, subject), whose ids are returned."""
    secured.tokens[name] = secured.ask("POST /v1/tokens", body={"identity": name})[1]["token"]
    added = [
        secured.ask("POST /v1/acl", body={"who": name, "action": action, "stream": stream, "subject": subject})
        for action, stream, subject in rules
    ]
    return [rule["id"] for _, rule, _ in added]


def test_a_long_poll_gets_no_messages_of_subjects_that_are_recorded_since_it_began(secured: Secured) -> None:
    for number in range(3):
        name = f"narrow-{number}"
        assert secured.ask("POST /v1/streams", body={"name": name, "subject": f"{name}.eu.>"})[0] == 201
        identity_with(secured, name, ("read", name, f"{name}.eu.>"))
        connection = http.client.HTTPConnection("127.0.0.1", secured.broker.http_port, timeout=30)
        headers = {"Authorization": f"Bearer {secured.tokens[name]}", "Accept": "application/x-ndjson"}
        before = polls(secured)
        connection.request("GET", f"/v1/streams/{name}/messages?start=0&wait_ms=20000", headers=headers)
        eventually(lambda before=before: polls(secured) > before, what="the poll has come")
        patched = secured.ask("PATCH /v1/streams/{name}", path={"name": name}, body={"subject": f"{name}.>"})
        assert patched[0] == 200
        publish_acked(secured.broker.nats_url, f"{name}.us.a", [b"theirs"])
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        assert answer.status == 403, body
        assert b"theirs" not in body
        assert b"dGhlaXJz" not in body


def test_a_commit_stores_only_subjects_that_are_permitted_when_it_is_made(secured: Secured) -> None:
    """Parts that were staged before a rule was removed, and parts that another identity has staged."""
    create_again(secured)
    (rule,) = identity_with(secured, "stager", ("publish", STREAM, "orders.us.>"))
    identity_with(secured, "stager", ("publish", STREAM, "orders.eu.>"))

    def staged(identity: str, batch: int, subject: str) -> list[Any]:
        with NatslogClient(secured.broker.url, ClientOptions(token=secured.tokens[identity])) as client:
            uploader = PartUploader(client, STREAM, "staging", batch)
            rows = {"value": pa.array([b"x"], pa.binary()), "subject": pa.array([subject])}
            uploader.add(pa.RecordBatch.from_pydict(rows))
            return uploader.finish()

    def commit(batch: int, parts: list[Any]) -> None:
        with NatslogClient(secured.broker.url, ClientOptions(token=secured.tokens["stager"])) as client:
            client.commit_append(STREAM, "staging", batch, parts)

    commit(1, staged("stager", 1, "orders.us.a"))
    before_the_change = [staged("stager", 2, "orders.us.a"), staged("stager", 3, "orders.eu.a")]
    of_another = [staged("admin", 4, "orders.us.a"), staged("admin", 5, "orders.eu.a")]
    assert secured.ask("DELETE /v1/acl/{rule}", path={"rule": rule})[0] == 204
    with pytest.raises(Forbidden, match="orders.us.a"):
        commit(2, before_the_change[0])
    commit(3, before_the_change[1])
    with pytest.raises(Forbidden, match="orders.us.a"):
        commit(4, of_another[0])
    commit(5, of_another[1])
    assert [row["subject"] for row in rows_of(secured, "admin")][6:] == ["orders.us.a", "orders.eu.a", "orders.eu.a"]


def test_who_disconnects_before_the_end_of_a_response_has_paid_for_it(secured: Secured) -> None:
    assert secured.ask("POST /v1/streams", body={"name": "large", "subject": "large"})[0] == 201
    publish_acked(secured.broker.nats_url, "large", [secrets.token_bytes(500_000) for _ in range(20)])
    identity_with(secured, "leaver", ("read", "large", ">"))
    quota = {"bytes_out_per_s": 100_000}
    assert secured.ask("PUT /v1/quotas", query="?identity=leaver", body=quota)[0] == 200
    connection = http.client.HTTPConnection("127.0.0.1", secured.broker.http_port, timeout=30)
    headers = {"Authorization": f"Bearer {secured.tokens['leaver']}"}
    connection.request("GET", "/v1/streams/large/messages?start=0&max_bytes=10000000", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 200
    assert len(answer.read(1000)) == 1000
    answer.close()
    connection.close()
    status, body, _ = secured.ask("GET /v1/streams/{name}", "leaver", path={"name": "large"})
    assert (status, body["error"]["code"]) == (429, "quota_exceeded")


def test_subjects_of_a_stream_are_shown_only_to_those_who_may_see_it(secured: Secured) -> None:
    assert secured.ask("POST /v1/streams", body={"name": "hidden", "subject": "hidden.subject"})[0] == 201
    identity_with(secured, "prober", ("manage", "*", "prober.>"))
    answers = [
        secured.ask("GET /v1/acl/check", "prober", query="?action=read&stream=hidden"),
        secured.ask("POST /v1/streams", "prober", body={"name": "hidden", "subject": "prober.x"}),
        secured.ask("PATCH /v1/streams/{name}", "prober", path={"name": "hidden"}, body={"subject": "prober.x"}),
        secured.ask("GET /v1/streams/{name}", "prober", path={"name": "hidden"}),
    ]
    assert [status for status, _, _ in answers] == [200, 409, 403, 403]
    assert not any("hidden.subject" in json.dumps(body) for _, body, _ in answers)
    found = secured.ask("GET /v1/acl/check", query="?identity=prober&action=read&stream=hidden")[1]
    assert found["subjects"] == ["hidden.subject"], "an administrator sees it"


def test_a_malformed_header_with_a_token_is_refused_without_showing_it(secured: Secured) -> None:
    token = secured.tokens["reader"]
    assert token is not None
    with socket.create_connection(("127.0.0.1", secured.broker.http_port), timeout=30) as connection:
        connection.sendall(f"GET /v1/whoami HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer\r\n {token}\r\n\r\n".encode())
        answer = b""
        while data := connection.recv(65536):
            answer += data
    assert b"400 Bad Request" in answer
    assert token.encode() not in answer


def test_internal_streams_are_read_by_monitors_and_administrators(secured: Secured) -> None:
    path = {"name": "__activity"}
    eventually(lambda: secured.ask("GET /v1/streams/{name}", path=path)[0] == 200, what="it is created")
    query = "?start=earliest&end=latest"
    answered = {
        identity: secured.ask("GET /v1/streams/{name}/messages", identity, path=path, query=query)[0]
        for identity in ("admin", "monitor", "reader", "part", "nothing")
    }
    assert answered == {"admin": 200, "monitor": 200, "reader": 403, "part": 403, "nothing": 403}
    _, listed, _ = secured.ask("GET /v1/streams", "reader", query="?internal=true")
    assert [one["name"] for one in listed] == [STREAM]
    tokens = [token for token in secured.tokens.values() if token]
    _, messages, _ = secured.ask("GET /v1/streams/{name}/messages", path=path, query=query)
    assert b"activity.security.changed" in messages
    secrets = [token.split("_", 2)[2] for token in tokens]  # a secret may contain "_"
    assert not [text for text in (*tokens, *secrets) if text.encode() in messages]
