"""The subjects of a stream in requests and records: one, or several that do not overlap."""

from __future__ import annotations

from typing import Any

import pytest

from natslog.errors import InvalidRequest
from natslog.model import MAX_SUBJECTS, StreamSettings, subject_setting, subjects_of
from natslog.stream_settings import parse_settings, setting_fields


def test_subject_is_the_first_of_subjects() -> None:
    one, more = parse_settings({"subject": "a"}), parse_settings({"subjects": ["b.>", "a", "c.*"]})
    assert (one.subjects, more.subjects) == (("a",), ("b.>", "a", "c.*"))
    assert (one, parse_settings({"subjects": ["a"]})) == (one, one)
    shown = more.to_json()
    assert (shown["subject"], shown["subjects"]) == ("b.>", ["b.>", "a", "c.*"])
    assert list(shown)[:2] == ["subject", "subjects"]
    assert "more_subjects" not in shown
    assert parse_settings({name: shown[name] for name in ("subject", "subjects")}) == more, "what is shown is accepted"


def test_either_setting_of_an_edit_replaces_all_subjects() -> None:
    was = parse_settings({"subjects": ["a", "b"], "max_messages": 7})
    assert parse_settings({"subjects": ["b", "c"]}, was).subjects == ("b", "c")
    assert parse_settings({"subject": "c"}, was).subjects == ("c",)
    assert parse_settings({"max_messages": 8}, was).subjects == ("a", "b")
    assert setting_fields({"subjects": ["a"], "max_age": 1}) == ("max_age_s", "subject")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, "a stream needs a subject"),
        ({"subjects": []}, f"1 to {MAX_SUBJECTS} subjects"),
        ({"subjects": None}, f"1 to {MAX_SUBJECTS} subjects"),
        ({"subjects": "a"}, f"1 to {MAX_SUBJECTS} subjects"),
        ({"subjects": [f"a.{number}" for number in range(MAX_SUBJECTS + 1)]}, f"1 to {MAX_SUBJECTS} subjects"),
        ({"subjects": ["a", 7]}, "a subject must not be empty"),
        ({"subjects": ["a", "b..c"]}, "'b..c' has an empty token"),
        ({"subjects": ["a", "$JS.API.>"]}, "choose another subject than '\\$JS.API.>'"),
        ({"subject": "b", "subjects": ["a", "b"]}, "subject 'b' is not the first of subjects, 'a'"),
        ({"subject": None, "subjects": ["a", "b"]}, "subject None is not the first"),
        ({"subjects": ["a", "b", "a"]}, "subjects 'a' and 'a' overlap"),
        ({"subjects": ["x", "orders.*.new", "orders.eu.>"]}, "'orders.\\*.new' and 'orders.eu.>' overlap"),
        ({"subjects": ["a", "*"], "acks": "never"}, "'a' and '\\*' overlap"),
        ({"subjects": ["a", "*.b"]}, "a stream on '\\*.b' records the requests to all services"),
        ({"subjects": ["$KV.x", "*.b"], "acks": "never"}, "'\\*.b' does not record subjects that begin with \\$"),
    ],
)
def test_subjects_that_cannot_be_are_refused(body: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        parse_settings(body)


def test_as_many_subjects_as_are_permitted() -> None:
    many = [f"a.{number}" for number in range(MAX_SUBJECTS)]
    assert parse_settings({"subjects": many}).subjects == tuple(many)


def test_subjects_of_a_stream_are_those_that_a_broker_states() -> None:
    assert subjects_of(StreamSettings(subject="a").to_json()) == ("a",)
    assert subjects_of(StreamSettings(subject="a", more_subjects=("b",)).to_json()) == ("a", "b")
    assert subject_setting("a") == subject_setting(["a"]) == {"subject": "a"}
    assert subject_setting(["a", "b"]) == {"subjects": ["a", "b"]}


# ---- limits and protection ----


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"max_message_bytes": 0}, "max_message_bytes 0 is not a size"),
        ({"max_message_bytes": True}, "max_message_bytes True is not a size"),
        ({"max_message_bytes": "2MiB", "max_bytes": "1MiB"}, "the stream could not keep such a message"),
        ({"deny_purge": "yes"}, "deny_purge 'yes' must be true or false"),
        ({"deny_delete": 1}, "deny_delete 1 must be true or false"),
        ({"dedupe_window": "3m", "max_age": "1m"}, "dedupe_window 3m is more than max_age 1m"),
        ({"dedupe_window": "1h", "max_age": "1m"}, "Lower dedupe_window, or raise max_age"),
        ({"ttl": "2d", "max_age": "1d"}, "ttl 2d is more than max_age 1d.* Lower ttl, or raise max_age"),
        ({"ttl": "100ms"}, "ttl .* must be at least 1s"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(body: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        parse_settings({"subject": "a"} | body)


def test_limits_of_an_edit_are_compared_with_those_that_stay() -> None:
    was = parse_settings({"subject": "a", "max_bytes": "1MiB", "dedupe_window": "10m"})
    for body in ({"max_message_bytes": "2MiB"}, {"max_age": "5m"}):
        with pytest.raises(InvalidRequest):
            parse_settings(body, was)
    assert parse_settings({"max_message_bytes": "2MiB", "max_bytes": None}, was).max_message_bytes == 2 << 20
    assert parse_settings({"max_age": "5m", "dedupe_window": "5m"}, was).max_age_s == 300
    contradicting = StreamSettings(subject="a", max_age_s=1.0, dedupe_window_s=9.0)
    assert parse_settings({"max_messages": 7}, contradicting).max_messages == 7, "written by an older version"


def test_the_default_window_contradicts_no_age() -> None:
    assert parse_settings({"subject": "a", "max_age": "1m"}).dedupe_window_s == 120.0


def test_protection_is_off_by_default() -> None:
    one = parse_settings({"subject": "a", "deny_purge": None, "deny_delete": False, "max_message_bytes": None})
    assert one == parse_settings({"subject": "a"})
    assert parse_settings({"subject": "a", "deny_purge": True}).deny_purge


def test_discard_is_old_or_new() -> None:
    with pytest.raises(InvalidRequest, match="'none' must be old or new"):
        parse_settings({"subject": "a", "discard": "none"})
    assert parse_settings({"subject": "a", "discard": "new"}).discard == "new"
    assert parse_settings({"subject": "a", "discard": "old"}).discard == "old"


def test_followers_of_a_group_cannot_stand_by() -> None:
    with pytest.raises(InvalidRequest, match="standby requires a stream without group"):
        parse_settings({"subject": "a", "standby": True, "group": "g"})
    was = parse_settings({"subject": "a", "standby": True})
    with pytest.raises(InvalidRequest, match="standby requires a stream without group"):
        parse_settings({"group": "g"}, was)
    assert parse_settings({"group": "g", "standby": None}, was).group == "g"
