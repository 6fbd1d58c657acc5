"""Plans: which changes make streams as they are declared, what cannot be, and which deletions are too many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from natslog.cli.applying import print_plan
from natslog.cluster.stream_changes import differences
from natslog.declared.plan import Planned, plan_of, present_settings, require_few_deletions
from natslog.declared.reading import Declared, read_files
from natslog.declared.writing import as_file
from natslog.errors import InvalidRequest
from natslog.stream_settings import SETTING_NAMES, parse_settings
from tests.pages import runs
from tests.readme import Block


def shown(name: str = "a", *, facts: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    """A stream as the API lists it."""
    body = {"subject": name} | given
    listed = {"name": name, "id": f"id of {name}", "settings_version": 4, "sealed": False, "messages": 7}
    return listed | parse_settings(body).to_json() | (facts or {})


def planned(stated: dict[str, Any], *listed: dict[str, Any]) -> Planned:
    (step,) = plan_of(Declared({"a": stated}, frozenset()), listed, prune=False)
    return step


def pruned(*listed: dict[str, Any], keep: tuple[str, ...] = ()) -> list[Planned]:
    streams = {name: {"subject": name, "managed_by": "shop"} for name in keep}
    return plan_of(Declared(streams, frozenset({"shop"})), listed, prune=True)


# ---- creations and changes ----


def test_a_missing_stream_is_created_with_what_is_stated() -> None:
    step = planned({"subject": "a", "max_age": "7d", "group": None})
    assert (step.action, step.requests) == ("create", ({"subject": "a", "max_age": "7d", "group": None},))
    assert step.changes == {"subjects": (None, ["a"]), "max_age": (None, "7d"), "group": (None, None)}
    refused = planned({"max_age": "7d"})
    assert (refused.action, refused.reason) == ("refused", "it cannot be created: a stream needs a subject")


@pytest.mark.parametrize(
    ("stated", "given"),
    [
        ({"max_age": "168h"}, {"max_age": "7d"}),
        ({"max_bytes": "10GiB"}, {"max_bytes": 10 * 2**30}),
        ({"subjects": ["b", "a"]}, {"subjects": ["a", "b"], "subject": "a"}),
        ({"subject": "a"}, {}),
        ({}, {"max_age": "7d", "replicas": 3}),
        ({"dedupe_window": None}, {"dedupe_window": 0}),
        ({"min_isr": 2}, {"replicas": 3}),
    ],
)
def test_nothing_is_changed_where_other_words_mean_the_same(stated: dict[str, Any], given: dict[str, Any]) -> None:
    assert planned(stated, shown(**given)).action == "unchanged"


def test_only_stated_settings_are_changed_and_others_are_named() -> None:
    step = planned({"max_messages": 9}, shown(max_messages=7, max_age="7d", replicas=3, min_isr=3))
    assert (step.action, step.changes, step.requests) == ("change", {"max_messages": (7, 9)}, ({"max_messages": 9},))
    assert step.keeps == {"replicas": 3, "min_isr": 3, "max_age": "7d"}
    assert (step.id, step.settings_version) == ("id of a", 4)
    assert planned({"max_age": None}, shown(max_age="7d")).requests == ({"max_age": None},)


def test_subjects_are_replaced_whichever_setting_states_them() -> None:
    assert planned({"subject": "b", "max_age": "7d"}, shown(max_age="7d")).requests == ({"subject": "b"},)
    assert planned({"subjects": ["a", "b"]}, shown()).requests == ({"subjects": ["a", "b"]},)
    assert planned({"subject": "a"}, shown(subjects=["a", "b"])).requests == ({"subject": "a"},)


def test_another_number_of_replicas_is_an_edit_of_its_own_with_its_min_isr() -> None:
    step = planned({"replicas": 3, "max_age": "7d"}, shown())
    assert step.requests == ({"max_age": "7d"}, {"replicas": 3})
    assert step.changes == {"replicas": (1, 3), "min_isr": (1, 2), "max_age": (None, "7d")}
    step = planned({"replicas": 5, "min_isr": 2}, shown(replicas=3))
    assert (step.requests, step.changes) == (({"replicas": 5, "min_isr": 2},), {"replicas": (3, 5)})
    assert planned({"min_isr": 3}, shown(replicas=3)).requests == ({"min_isr": 3},)


def test_while_the_number_of_replicas_changes_the_new_one_is_compared() -> None:
    moving = shown(replicas=1, facts={"target_replica_ids": [1, 2, 3]})
    assert planned({"replicas": 3}, moving).action == "unchanged"
    assert planned({"replicas": 3, "min_isr": 3}, moving).action == "unchanged", "it is not shown yet"
    assert planned({"replicas": 1}, moving).requests == ({"replicas": 1},)
    fewer = shown(replicas=3, facts={"target_replica_ids": [1]})
    assert planned({"replicas": 1, "max_age": "7d"}, fewer).requests == ({"max_age": "7d"},)


@pytest.mark.parametrize(
    ("stated", "one", "reason"),
    [
        ({"deny_purge": False}, shown(deny_purge=True), "deny_purge cannot be turned off"),
        ({"max_age": "1d"}, shown(facts={"sealed": True}), "the stream is sealed, so max_age cannot be edited"),
        ({"managed_by": "shop"}, shown(managed_by="other"), "it has managed_by 'other', not 'shop'"),
        ({"ttl": "2d"}, shown(max_age="1d"), "ttl 2d is more than max_age 1d"),
        ({"min_isr": 2}, shown(), "min_isr 2 is more than the number of replicas"),
        ({"max_age": "1d"}, shown(facts={"compression": "brotli"}), "compression 'brotli' must be"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(stated: dict[str, Any], one: dict[str, Any], reason: str) -> None:
    step = planned(stated, one)
    assert (step.action, step.requests) == ("refused", ())
    assert reason in step.reason


def test_what_can_be_edited_of_a_sealed_stream_is_not_refused() -> None:
    sealed = shown(facts={"sealed": True})
    assert planned({"replicas": 3, "prevent_delete": True, "managed_by": "shop"}, sealed).action == "change"
    assert planned({"max_age": None}, sealed).action == "unchanged"


def test_a_stream_is_adopted_and_released_by_managed_by() -> None:
    assert planned({"managed_by": "shop"}, shown()).changes == {"managed_by": (None, "shop")}
    assert planned({"managed_by": None}, shown(managed_by="shop")).changes == {"managed_by": ("shop", None)}


# ---- deletions ----


def test_only_streams_with_a_managed_by_of_the_files_are_deleted() -> None:
    mine, kept = shown("mine", managed_by="shop"), shown("kept", managed_by="shop")
    others = [shown("other", managed_by="else"), shown("free"), shown("__own", managed_by="shop")]
    deleted, unchanged = sorted(pruned(mine, kept, *others, keep=("kept",)), key=lambda step: step.action)
    assert (deleted.stream, deleted.action, deleted.messages) == ("mine", "delete", 7)
    assert (deleted.id, deleted.settings_version) == ("id of mine", 4)
    assert (unchanged.stream, unchanged.action) == ("kept", "unchanged")
    (unlisted,) = plan_of(Declared({}, frozenset({"shop"})), [mine], prune=False)
    assert unlisted.action == "unlisted"
    assert plan_of(Declared({}, frozenset()), [mine, *others], prune=True) == []


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (shown("a", managed_by="shop", prevent_delete=True), "--no-prevent-delete"),
        (shown("a", managed_by="shop", facts={"jetstream": {}}), "JetStream clients have created or changed it"),
        (shown("KV_a", managed_by="shop"), "JetStream clients have created or changed it"),
        (shown("OBJ_a", managed_by="shop"), "JetStream clients have created or changed it"),
    ],
)
def test_protected_streams_and_those_of_jetstream_are_not_deleted(one: dict[str, Any], reason: str) -> None:
    (step,) = pruned(one)
    assert step.action == "protected"
    assert reason in step.reason


def check(listed: list[dict[str, Any]], *, keep: tuple[str, ...], most: int = 3, delete_all: bool = False) -> None:
    streams = {name: {"subject": name, "managed_by": "shop"} for name in keep}
    declared = Declared(streams, frozenset({"shop"}))
    steps = plan_of(declared, listed, prune=True)
    require_few_deletions(steps, declared, listed, most=most, delete_all=delete_all)


def test_a_truncated_file_deletes_nothing() -> None:
    listed = [shown(name, managed_by="shop") for name in "abcde"]
    with pytest.raises(InvalidRequest, match=r"would delete 4 streams \(b, c, d, e\), more than --max-deletions 3"):
        check(listed, keep=("a",))
    check(listed, keep=("a",), most=4)
    check(listed, keep=("a", "b"))


def test_an_empty_file_deletes_nothing_without_consent_of_its_own() -> None:
    listed = [shown(name, managed_by="shop") for name in "ab"]
    with pytest.raises(InvalidRequest, match="would delete every stream with managed_by 'shop'"):
        check(listed, keep=())
    check(listed, keep=(), delete_all=True)
    with pytest.raises(InvalidRequest, match="more than --max-deletions 1"):
        check(listed, keep=(), delete_all=True, most=1)
    check(listed, keep=("c",))


# ---- a file of present streams ----

MS, BYTES = st.integers(1, 10**12).map("{}ms".format), st.integers(1, 2**62)
NAMES = st.text("abc_-1", min_size=1, max_size=5).filter(lambda name: name[0] != "-")
SUBJECTS = st.lists(NAMES.map("s.{}.>".format), min_size=1, max_size=3, unique=True)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "subjects": SUBJECTS,
    "replicas": st.integers(1, 9),
    "min_isr": st.none() | st.integers(1, 9),
    "group": st.none() | NAMES,
    "max_age": st.none() | MS,
    "max_bytes": st.none() | BYTES,
    "max_messages": st.none() | st.integers(1, 2**62),
    "max_messages_per_subject": st.none() | st.integers(1, 1_000_000),
    "compact": st.booleans(),
    "tombstone_retention": MS,
    "allow_ttl": st.booleans(),
    "ttl": st.none() | st.integers(1000, 10**12).map("{}ms".format),
    "discard": st.sampled_from(["old", "new"]),
    "compression": st.sampled_from(["none", "zstd", "lz4"]),
    "dedupe_window": st.none() | MS,
    "acks": st.sampled_from(["reply", "any", "header", "never"]),
    "max_message_bytes": st.none() | BYTES,
    "deny_delete": st.booleans(),
    "deny_purge": st.booleans(),
    "allow_rollup": st.booleans(),
    "placement_tags": st.lists(NAMES, max_size=3, unique=True),
    "prevent_delete": st.booleans(),
    "standby": st.booleans(),
    "managed_by": st.none() | NAMES,
}


def test_every_setting_has_values() -> None:
    assert VALUES.keys() == set(SETTING_NAMES) - {"subject"}


SETTINGS = st.fixed_dictionaries(
    {"subjects": SUBJECTS}, optional={name: values for name, values in VALUES.items() if name != "subjects"}
)


@pytest.mark.long
@given(body=SETTINGS, name=st.sampled_from(["a", "a.b", "a-1"]))
@settings(max_examples=80, deadline=None)
def test_streams_that_are_printed_as_a_file_are_as_that_file_declares_them(
    tmp_path_factory: pytest.TempPathFactory, body: dict[str, Any], name: str
) -> None:
    try:
        wanted = parse_settings(body)
    except InvalidRequest:  # they contradict each other
        assume(False)
    one = shown(name) | wanted.to_json()
    path = tmp_path_factory.getbasetemp() / "exported.toml"
    path.write_text(as_file([one]))
    declared = read_files([str(path)])
    (step,) = plan_of(declared, [one], prune=True)
    assert (step.action, dict(step.keeps)) == ("unchanged", {}), "and no setting is left out"
    (creation,) = plan_of(declared, [], prune=True)
    created = parse_settings(dict(creation.requests[0]))
    assert differences(created, present_settings(one)[0]) == {}


def test_streams_of_jetstream_are_named_in_a_comment() -> None:
    text = as_file([shown("a"), shown("KV_b", facts={"jetstream": {"allow_direct": True}})])
    assert text == (
        '[streams.a]\nsubjects = ["a"]\n\n'
        "# Not declared here, because JetStream clients have created or changed it: KV_b\n"
    )


# ---- the page ----


@runs("OPERATIONS.md", file="Declared streams", plan="Declared streams (2)")
def test_the_plan_that_operations_shows_is_the_one_that_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: Block, plan: Block
) -> None:
    path = tmp_path / "streams.toml"
    path.write_text(file.text)
    mine = {"managed_by": "shop", "replicas": 3, "compression": "zstd"}
    was = {"subject": "orders.>", "max_age": "7d", "max_bytes": "10GiB", "max_messages": 10**6, "prevent_delete": True}
    orders = shown("orders", **mine, **was)
    payments = shown("payments", **mine, prevent_delete=True)
    returns = shown("returns", **mine, facts={"messages": 1204})
    print_plan(plan_of(read_files([str(path)]), [orders, payments, returns], prune=True))
    (command,) = plan.commands
    assert command.text == "natslog apply -f streams.toml --prune --dry-run"
    assert command.is_answered_by(capsys.readouterr().out)
