"""What rules permit, compared with a model that tries subjects one by one."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.security.decisions import Decisions, is_whole, touches
from natslog.security.records import Rule, Security
from natslog.subjects import covers, includes, overlap

TOKENS = ("a", "b", "*", ">")
PATTERNS = [
    ".".join(tokens) for count in (1, 2, 3) for tokens in product(TOKENS, repeat=count) if ">" not in tokens[:-1]
]
SUBJECTS = [".".join(tokens) for count in (1, 2, 3, 4) for tokens in product(("a", "b", "c"), repeat=count)]
COVERED = {pattern: frozenset(one for one in SUBJECTS if covers(pattern, one)) for pattern in PATTERNS}


def test_includes_and_overlap_agree_with_the_subjects_that_patterns_cover() -> None:
    for one, other in product(PATTERNS, repeat=2):
        assert includes(one, other) == (COVERED[one] >= COVERED[other]), (one, other)
        assert overlap(one, other) == bool(COVERED[one] & COVERED[other]), (one, other)


@given(st.lists(st.sampled_from(PATTERNS), max_size=4), st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3))
def test_a_limit_never_leaves_out_a_check_that_is_needed(rules: list[str], recorded: list[str]) -> None:
    permitted = frozenset().union(*(COVERED[one] for one in rules))
    stored = frozenset().union(*(COVERED[one] for one in recorded))
    assert touches(tuple(rules), recorded) == bool(permitted & stored)
    if is_whole(tuple(rules), recorded):
        assert stored <= permitted  # the reverse may fail: several patterns together can cover one


def decisions(*rules: tuple[str, str, str, str], roles: dict[str, tuple[str, ...]] | None = None) -> Decisions:
    records = {
        f"r{at}": Rule(id=f"r{at}", who=who, action=action, stream=stream, subject=subject)  # type: ignore[arg-type]
        for at, (who, action, stream, subject) in enumerate(rules)
    }
    return Decisions(Security(rules=records, roles=roles or {}))


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*", "anything", True),
        ("orders*", "orders", True),
        ("orders*", "orders-eu", True),
        ("orders*", "other-orders", False),
        ("orders", "orders2", False),
        ("orders", "ORDERS", False),
        ("o?ders", "orders", True),
        ("a.b", "aXb", False),
        ("orders", "orders\n", False),
    ],
)
def test_stream_patterns(pattern: str, name: str, *, matches: bool) -> None:
    found = decisions(("alice", "read", pattern, ">")).subjects("alice", "read", name)
    assert found == ((">",) if matches else ())


def test_a_name_that_no_stream_can_have_is_not_kept() -> None:
    """Clients choose the names that are asked about, and they can be as long as a request."""
    found = decisions(("alice", "read", "a*", ">"))
    assert found.subjects("alice", "read", "a" * 255) == (">",)
    kept = len(found._found)
    assert found.subjects("alice", "read", "a" * 256) == ()
    assert found.subjects("bob", "read", "a" * 4_000_000) == ()
    assert len(found._found) == kept


def test_nothing_is_permitted_without_a_rule() -> None:
    assert decisions().subjects("alice", "read", "orders") == ()
    assert decisions(("bob", "read", "*", ">")).subjects("alice", "read", "orders") == ()


def test_a_rule_permits_its_action_only_and_admin_permits_all() -> None:
    found = decisions(("alice", "read", "*", ">"), ("root", "admin", "*", ">"))
    assert found.subjects("alice", "read", "orders") == (">",)
    assert found.subjects("alice", "publish", "orders") == ()
    assert found.subjects("root", "publish", "orders") == (">",)


def test_roles_and_everyone_but_not_those_without_credentials() -> None:
    found = decisions(
        ("role:ops", "manage", "*", ">"), ("*", "read", "public", ">"), roles={"alice": ("ops",), "bob": ("dev",)}
    )
    assert found.subjects("alice", "manage", "orders") == (">",)
    assert found.subjects("bob", "manage", "orders") == ()
    assert found.subjects("ops", "manage", "orders") == (), "an identity with the name of a role does not have it"
    assert found.subjects("bob", "read", "public") == (">",)
    assert found.subjects("anonymous", "read", "public") == ()
    assert decisions(("anonymous", "read", "public", ">")).subjects("anonymous", "read", "public") == (">",)


def test_only_rules_for_everything_permit_actions_on_the_cluster() -> None:
    assert not decisions(("alice", "admin", "orders*", ">")).rules("alice", "admin")
    assert not decisions(("alice", "admin", "*", "orders.>")).rules("alice", "admin")
    assert decisions(("alice", "admin", "*", ">")).rules("alice", "admin")


@pytest.mark.parametrize(
    ("rule", "action", "permits"),
    [
        (("ann", "read", "*", ">"), "read", False),
        (("ann", "manage", "*", ">"), "manage", False),
        (("ann", "read", "__activity", ">"), "read", True),
        (("ann", "read", "__*", ">"), "read", True),
        (("ann", "monitor", "*", ">"), "read", True),
        (("ann", "monitor", "*", ">"), "manage", False),
        (("ann", "monitor", "orders", ">"), "read", False),
        (("ann", "admin", "*", ">"), "read", True),
        (("ann", "admin", "orders", ">"), "read", False),
    ],
)
def test_internal_streams_are_for_rules_that_mean_them(
    rule: tuple[str, str, str, str], action: str, permits: bool
) -> None:
    assert bool(decisions(rule).subjects("ann", action, "__activity")) == permits  # type: ignore[arg-type]
