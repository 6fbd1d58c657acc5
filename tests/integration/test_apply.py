"""`natslog apply`: streams become as files declare them; what others changed, protected or own is not overwritten."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from natslog.cli.main import main
from natslog.client import ClientOptions, NatslogClient
from natslog.declared.applying import Outcome, apply_plan
from natslog.declared.plan import Planned, plan_of
from natslog.declared.reading import Declared
from natslog.errors import RemovalDenied, SettingsConflict, StreamConflict, StreamRecreated
from natslog.model import Fork, StreamSettings
from natslog.stream_settings import SETTING_NAMES
from tests.cluster_harness import running_cluster
from tests.harness import BrokerProcess, eventually, natslog, on_terminal, publish_acked, running, with_nats
from tests.integration.test_access import admin_token


class Applied:
    """Runs of `natslog apply` with one file, in this process."""

    def __init__(self, urls: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.urls, self.path, self._capsys = urls, path, capsys

    def __call__(self, text: str, *options: str, code: int = 0, token: str | None = None) -> str:
        self.path.write_text(text)
        credentials = [] if token is None else ["--token", token]
        with pytest.raises(SystemExit) as ended:
            main(["--server", self.urls, *credentials, "apply", "-f", str(self.path), *options])
        said = self._capsys.readouterr()
        assert ended.value.code == code, said
        return said.out + said.err


@pytest.fixture
def apply(broker: BrokerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Applied:
    return Applied(broker.url, tmp_path / "streams.toml", capsys)


def declare(name: str, *streams: str, settings: str = "") -> str:
    """A file with a managed_by of this test's own."""
    tables = (f'[streams.{one}]\nsubject = "{one}"\n{settings}\n' for one in streams)
    return f'[defaults]\nmanaged_by = "{name}"\n' + "".join(tables)


def names(client: NatslogClient) -> set[str]:
    return {one["name"] for one in client.streams()}


# ---- create, change, nothing ----


@pytest.mark.long
def test_streams_are_created_and_changed_as_declared_and_the_second_run_changes_nothing(
    apply: Applied, client: NatslogClient, name: str
) -> None:
    text = f'[streams.{name}]\nsubjects = ["{name}.>"]\nmax_age = "7d"\nmax_bytes = "10GiB"\nprevent_delete = true\n'
    assert f"+ {name}: create\n    subjects: {name}.>\n    max_age: 7d\n" in apply(text, "--dry-run", code=3)
    assert name not in names(client)
    assert f"stream {name} created\n" in apply(text)
    before = client.stream(name)
    assert (before["max_age"], before["max_bytes"], before["prevent_delete"]) == ("7d", 10 * 2**30, True)
    assert f"  {name}: unchanged\nplan: 1 unchanged\n" in apply(text, "--dry-run")
    report = json.loads(apply(text, "--json"))
    assert report == {"plan": [{"stream": name, "action": "unchanged"}], "results": []}
    assert client.stream(name)["settings_version"] == before["settings_version"]
    client.edit_stream(name, max_bytes="1GiB", max_messages=7)
    plan = json.loads(apply(text, "--dry-run", "--json", code=3))["plan"]
    changes = {"max_bytes": {"from": 2**30, "to": 10 * 2**30}}
    assert plan == [{"stream": name, "action": "change", "changes": changes, "keeps": {"max_messages": 7}}]
    shown = apply(text)
    assert f"~ {name}: change\n    max_bytes: 1GiB → 10GiB\n    not declared, and kept: max_messages 7\n" in shown
    after = client.stream(name)
    assert (after["max_bytes"], after["max_messages"]) == (10 * 2**30, 7)


def test_the_failure_of_one_stream_does_not_hide_others_and_nothing_is_deleted_then(
    apply: Applied, client: NatslogClient, name: str
) -> None:
    apply(declare(name, f"{name}-a", f"{name}-b"))
    client.seal(f"{name}-b")
    text = declare(name, f"{name}-b", settings="max_messages = 7")
    text += f'[streams.{name}-c]\nsubject = "c"\nreplicas = 3\n[streams.{name}-d]\nsubject = "d"\n'
    report = json.loads(apply(text, "--prune", "--yes", "--json", code=1))
    assert [(one["stream"][-1], one["action"]) for one in report["plan"]] == [
        ("a", "delete"), ("b", "refused"), ("c", "create"), ("d", "create")
    ]  # fmt: skip
    outcomes = {one["stream"][-1]: one for one in report["results"]}
    assert {at: one["outcome"] for at, one in outcomes.items()} == {
        "a": "skipped", "b": "failed", "c": "failed", "d": "done"
    }  # fmt: skip
    assert outcomes["c"]["error"]["code"] == "not_enough_brokers"
    assert "is sealed" in outcomes["b"]["error"]["message"]
    assert {f"{name}-a", f"{name}-b", f"{name}-d"} <= names(client)
    assert "refused" in apply(text, "--dry-run", code=1)


def outcome_after(client: NatslogClient, step: Planned, change: Any) -> Outcome:
    """Of a plan, if somebody does something before it is applied."""
    change()
    (outcome,) = apply_plan(client, [step])
    assert outcome.outcome == "failed"
    return outcome


def test_a_stream_that_was_edited_since_the_plan_is_neither_changed_nor_deleted(
    client: NatslogClient, name: str
) -> None:
    client.create_stream(name, name, managed_by=name)
    (change,) = plan_of(Declared({name: {"max_messages": 7}}, frozenset()), client.streams(), prune=False)
    outcome = outcome_after(client, change, lambda: client.edit_stream(name, max_messages=9))
    assert isinstance(outcome.error, SettingsConflict)
    assert client.stream(name)["max_messages"] == 9
    (deletion,) = plan_of(Declared({}, frozenset({name})), client.streams(), prune=True)
    outcome = outcome_after(client, deletion, lambda: client.edit_stream(name, managed_by=None))
    assert isinstance(outcome.error, SettingsConflict)

    def create_again() -> None:
        client.delete_stream(name)
        client.create_stream(name, name)

    assert isinstance(outcome_after(client, deletion, create_again).error, StreamRecreated)
    assert name in names(client)


def test_a_stream_that_was_created_since_the_plan_is_not_changed(client: NatslogClient, name: str) -> None:
    (creation,) = plan_of(Declared({name: {"subject": name, "max_messages": 7}}, frozenset()), [], prune=False)
    error = outcome_after(client, creation, lambda: client.create_stream(name, name, max_messages=9)).error
    assert isinstance(error, StreamConflict)
    assert client.stream(name)["max_messages"] == 9


def test_a_deletion_may_name_what_it_is_for(client: NatslogClient, name: str) -> None:
    first = client.create_stream(name, name)
    with pytest.raises(SettingsConflict):
        client.delete_stream(name, if_version=3)
    with pytest.raises(StreamRecreated):
        client.delete_stream(name, id="ab" * 16)
    client.delete_stream(name, id=first["id"], if_version=0)
    assert name not in names(client)


# ---- deletions ----


@pytest.mark.long
def test_prune_deletes_what_is_declared_no_more_and_nothing_else(
    apply: Applied, client: NatslogClient, nats_url: str, name: str
) -> None:
    apply(declare(name, f"{name}-a", f"{name}-b"))
    client.create_stream(f"{name}-free", f"{name}-free")
    client.create_stream(f"{name}-other", f"{name}-other", managed_by="other")
    publish_acked(nats_url, f"{name}-b", [b"1", b"2"])
    before, text = names(client), declare(name, f"{name}-a")
    assert f"? {name}-b: not declared any more; --prune would delete it" in apply(text)
    assert f"- {name}-b: delete, with 2 messages" in apply(text, "--prune", "--dry-run", code=3)
    assert f"nothing was changed, and {name}-b (2 messages) not deleted" in apply(text, "--prune", code=1)
    assert names(client) == before
    assert f"stream {name}-b deleted" in apply(text, "--prune", "--yes")
    assert names(client) == before - {f"{name}-b"}
    apply(text, "--prune", "--yes", "--dry-run")


@pytest.mark.long
@pytest.mark.parametrize("answer", ["y", "n"])
def test_deletions_are_confirmed_on_a_terminal(apply: Applied, client: NatslogClient, name: str, answer: str) -> None:
    apply(declare(name, f"{name}-a", f"{name}-b"))
    apply.path.write_text(declare(name, f"{name}-a", f"{name}-c"))
    code, shown = on_terminal("apply", "-f", str(apply.path), "--prune", url=apply.urls, types=f"{answer}\n")
    assert f"Apply this plan, and delete {name}-b (0 messages)? [y/N]" in shown
    present = names(client) & {f"{name}-a", f"{name}-b", f"{name}-c"}
    expected = (0, {f"{name}-a", f"{name}-c"}) if answer == "y" else (1, {f"{name}-a", f"{name}-b"})
    assert (code, present) == expected


@pytest.mark.long
def test_empty_and_truncated_files_delete_nothing(apply: Applied, client: NatslogClient, name: str) -> None:
    streams = [f"{name}-{at}" for at in range(5)]
    apply(declare(name, *streams))
    assert "no file states one: write managed_by under [defaults]" in apply("", "--prune", "--yes", code=1)
    assert "would delete 5 streams" in apply(declare(name), "--prune", "--yes", code=1)
    assert "more than --max-deletions 3" in apply(declare(name, streams[0]), "--prune", "--yes", code=1)
    few = ("--prune", "--yes", "--max-deletions", "5")
    assert "pass --delete-all as well" in apply(declare(name), *few, code=1)
    assert set(streams) <= names(client)
    apply(declare(name), *few, "--delete-all")
    assert not set(streams) & names(client)


@pytest.mark.long
def test_a_protected_stream_is_not_deleted_by_any_api_until_that_is_turned_off(
    apply: Applied, client: NatslogClient, broker: BrokerProcess, nats_url: str, name: str
) -> None:
    apply(declare(name, f"{name}-a", f"{name}-b", f"{name}-c", settings="prevent_delete = true"))
    kept, other = f"{name}-a", f"{name}-b"
    client.edit_stream(other, prevent_delete=False)
    text = declare(name, f"{name}-c")
    assert f"natslog stream edit {kept} --no-prevent-delete" in apply(text, "--prune", "--yes", code=1)
    assert kept in names(client)
    assert other not in names(client), "the refusal of one deletion does not prevent the others"
    refused = natslog("stream", "rm", kept, "--yes", url=broker.url, check=False)
    assert refused.returncode == 1
    assert "has prevent_delete, and was not deleted" in refused.stderr
    with pytest.raises(RemovalDenied):
        client.delete_stream(kept)
    answer = json.loads(
        with_nats(nats_url, lambda nats: nats.request(f"$JS.API.STREAM.DELETE.{kept}", timeout=30)).data
    )
    assert (answer["error"]["err_code"], "prevent_delete" in answer["error"]["description"]) == (10050, True)
    client.seal(kept)
    natslog("stream", "edit", kept, "--no-prevent-delete", url=broker.url)
    apply(text, "--prune", "--yes")
    assert kept not in names(client)


def test_an_update_by_a_jetstream_client_keeps_what_operators_have_set_and_prune_keeps_the_stream(
    apply: Applied, client: NatslogClient, nats_url: str, name: str
) -> None:
    apply(declare(name, f"{name}-a", f"{name}-b", settings="prevent_delete = true"))

    async def update(nats: Any) -> None:
        jetstream = nats.jetstream()
        config = (await jetstream.stream_info(f"{name}-a")).config
        config.max_msgs = 77
        await jetstream.update_stream(config)

    with_nats(nats_url, update)
    changed = client.edit_stream(f"{name}-a", prevent_delete=False)
    assert (changed["max_messages"], changed["managed_by"]) == (77, name)
    shown = apply(declare(name, f"{name}-b"), "--prune", "--yes", code=1)
    assert "JetStream clients have created or changed it" in shown
    assert f"{name}-a" in names(client)


def test_a_program_may_still_create_its_stream_at_every_start(client: NatslogClient, name: str) -> None:
    client.create_stream(name, name, managed_by="shop", prevent_delete=True)
    assert client.create_stream(name, name)["managed_by"] == "shop"
    with pytest.raises(StreamConflict, match="managed_by is 'shop', not 'else'"):
        client.create_stream(name, name, managed_by="else")


def test_a_restored_copy_is_not_managed_by_the_declaration_of_the_original(client: NatslogClient, name: str) -> None:
    settings = StreamSettings(subject=name, managed_by="shop", prevent_delete=True).to_json()
    fork = Fork(id="ab" * 16, offset=0)
    client.begin_import(name, settings=settings, lineage=(fork,), first_offset=0, subjects=(name,))
    (copy,) = (one for one in client.streams() if one["name"] == name)
    assert (copy["managed_by"], copy["prevent_delete"]) == (None, True)


# ---- a file of present streams ----

EVERY_SETTING: dict[str, Any] = {
    "subjects": ["every", "every.*.>"],
    "replicas": 1,
    "min_isr": 1,
    "group": "shared",
    "max_age": "36h",
    "max_bytes": 123_456_789,
    "max_messages": 7_000,
    "max_messages_per_subject": 70,
    "compact": True,
    "tombstone_retention": "90m",
    "allow_ttl": True,
    "ttl": "90s",
    "discard": "new",
    "compression": "lz4",
    "dedupe_window": None,
    "acks": "header",
    "max_message_bytes": 65_536,
    "deny_delete": True,
    "deny_purge": True,
    "allow_rollup": False,  # excludes deny_purge
    "standby": False,  # excludes a group
    "placement_tags": [],  # the broker has none
    "prevent_delete": True,
    "managed_by": "every",
}


def test_streams_printed_as_a_file_are_as_that_file_declares_them(apply: Applied, client: NatslogClient) -> None:
    assert EVERY_SETTING.keys() == set(SETTING_NAMES) - {"subject"}
    client.create_stream("every", "every", **EVERY_SETTING)
    client.create_stream("every.rollup", "rollup", allow_rollup=True)
    original = client.stream("every")
    text = natslog("stream", "ls", "--toml", url=apply.urls).stdout
    assert "[streams.every]\n" in text
    assert '[streams."every.rollup"]\n' in text
    plan = json.loads(apply(text, "--dry-run", "--json"))["plan"]
    listed = [one for one in client.streams() if "jetstream" not in one]
    assert [one for one in plan if one["action"] != "unlisted"] == [
        {"stream": one["name"], "action": "unchanged"} for one in listed
    ]
    client.edit_stream("every", prevent_delete=False)
    client.delete_stream("every")
    apply(text)
    again = client.stream("every")
    assert [one for one in SETTING_NAMES if again[one] != original[one]] == []
    assert again["id"] != original["id"]


# ---- access, and clusters ----


@pytest.mark.long
def test_each_stream_that_an_identity_may_not_manage_is_an_error_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path / "own", environment={"NATSLOG_SECURITY": "true"}) as (_, broker):
        admin = NatslogClient(broker.url, ClientOptions(token=admin_token(broker)))
        token = admin.create_token("deployer")["token"]
        admin.add_rule("deployer", "manage", "mine*", "mine.>")
        admin.create_stream("theirs", "theirs")
        subjects = {"mine": "mine.>", "mine2": "other", "new": "mine.x", "theirs": "theirs"}
        text = "".join(f'[streams.{one}]\nsubject = "{on}"\n' for one, on in subjects.items())
        shown = Applied(broker.url, tmp_path / "streams.toml", capsys)(text, "--json", code=1, token=token)
        found = {one["stream"]: one.get("error", {}).get("code") for one in json.loads(shown)["results"]}
        assert found == {"mine": None, "mine2": "forbidden", "new": "forbidden", "theirs": "forbidden"}
        assert {one["name"] for one in admin.streams()} == {"mine", "theirs"}


@pytest.mark.long
def test_apply_waits_for_a_broker_that_is_started_later(
    apply: Applied, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    broker.kill()
    assert "no broker answered" in apply(declare(name, name), code=1)
    starting = Timer(0.5, broker.start)
    starting.start()
    try:
        apply(declare(name, name), "--wait", "60")
    finally:
        starting.join()
    assert name in names(client)


@pytest.mark.long
def test_a_cluster_is_changed_while_a_broker_is_down_and_replicas_are_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_cluster(tmp_path / "own") as cluster:
        urls = ",".join(broker.url for broker in cluster.brokers)
        apply, client = Applied(urls, tmp_path / "streams.toml", capsys), cluster.client()

        def text(settings: str) -> str:
            return f"[defaults]\n{settings}\n" + "".join(f"[streams.s{at}]\nsubject = 's{at}'\n" for at in range(3))

        failed = eventually(cluster.metadata_leader)
        failed.kill()
        apply(text("replicas = 2\nmin_isr = 1"))
        apply(text("replicas = 2\nmin_isr = 1\nmax_age = '1d'"))
        failed.start()
        cluster.wait_in_sync()
        changed = text("replicas = 3\nmax_age = '2d'")
        apply(changed, "--dry-run", code=3)
        apply(changed)
        apply(changed, "--dry-run")  # also while the replicas are being copied
        wanted = {(3, 1, "2d")}
        eventually(lambda: {(one["replicas"], one["min_isr"], one["max_age"]) for one in client.streams()} == wanted)
        apply(changed, "--dry-run")
