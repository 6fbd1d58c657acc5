"""Commands about security: what they change, and what is refused."""

from __future__ import annotations

import pytest

from natslog.cluster.commands import (
    BrokerRecord,
    CreateStream,
    EditStream,
    Proposal,
    ResizeReplicas,
)
from natslog.cluster.encoding import decode_proposal, decode_state, encode_proposal, encode_state
from natslog.cluster.features import LATEST_LEVEL
from natslog.cluster.metadata import Metadata
from natslog.cluster.security_changes import changed_security
from natslog.cluster.security_commands import (
    AddRule,
    AssignRole,
    CreateToken,
    DropRule,
    EnableSecurity,
    RevokeToken,
    SecurityCommand,
    SetQuota,
)
from natslog.errors import InvalidRequest, SecurityConflict, SecurityNotFound, StorageQuotaExceeded
from natslog.model import BrokerId, StreamId, StreamSettings
from natslog.security.records import Quota, Security, TokenRecord

DAY_US = 24 * 3600 * 1_000_000


def token(name: str, identity: str = "alice", *, created_us: int = 0, expires_us: int | None = None) -> TokenRecord:
    return TokenRecord(id=name, identity=identity, digest="0" * 64, created_us=created_us, expires_us=expires_us)


def enabled(*commands: SecurityCommand) -> Security:
    security = changed_security(None, EnableSecurity(token=token("first", "admin")))
    for command in commands:
        security = changed_security(security, command)
    return security


def rule(who: str, action: str = "read", stream: str = "*", subject: str = ">") -> AddRule:
    return AddRule(who=who, action=action, stream=stream, subject=subject)  # type: ignore[arg-type]


def test_security_is_enabled_once() -> None:
    security = enabled()
    assert list(security.tokens) == ["first"]
    assert security.roles == {"admin": ("admin",)}
    assert [(one.who, one.action) for one in security.rules.values()] == [("role:admin", "admin")]
    assert changed_security(security, EnableSecurity(token=token("second", "admin"))) is security


def test_nothing_can_be_changed_while_it_is_not_enabled() -> None:
    for command in (CreateToken(token=token("a")), rule("alice"), SetQuota(identity="*", quota=Quota())):
        with pytest.raises(InvalidRequest, match="not enabled"):
            changed_security(None, command)


def test_tokens_are_created_and_revoked() -> None:
    security = enabled(CreateToken(token=token("a"), roles=("ops", "dev")))
    assert security.roles["alice"] == ("dev", "ops")
    assert list(changed_security(security, RevokeToken(id="a")).tokens) == ["first"]
    with pytest.raises(SecurityNotFound):
        changed_security(security, RevokeToken(id="b"))
    with pytest.raises(SecurityConflict, match="revoke it"):
        changed_security(security, CreateToken(token=token("a", "bob")))


def test_tokens_that_expired_long_ago_are_forgotten() -> None:
    security = enabled(CreateToken(token=token("old", expires_us=DAY_US)), CreateToken(token=token("new")))
    security = changed_security(security, CreateToken(token=token("later", created_us=20 * DAY_US)))
    assert set(security.tokens) == {"first", "old", "new", "later"}
    security = changed_security(security, CreateToken(token=token("last", created_us=32 * DAY_US)))
    assert set(security.tokens) == {"first", "new", "later", "last"}


def test_rules_are_added_once_and_their_ids_are_not_used_again() -> None:
    security = enabled(rule("alice"), rule("bob"))
    assert changed_security(security, rule("alice")) is security
    security = changed_security(security, DropRule(id="r3"))
    assert list(changed_security(security, rule("carol")).rules) == ["r1", "r2", "r4"]
    with pytest.raises(SecurityNotFound):
        changed_security(security, DropRule(id="r3"))


@pytest.mark.parametrize("command", [DropRule(id="r1"), AssignRole(identity="admin", role="admin", is_assigned=False)])
def test_someone_can_always_administer(command: SecurityCommand) -> None:
    with pytest.raises(SecurityConflict, match="administer"):
        changed_security(enabled(rule("bob", "admin", "orders")), command)
    assert changed_security(enabled(rule("bob", "admin")), command)


def test_roles_are_assigned_and_taken() -> None:
    security = enabled(AssignRole(identity="bob", role="ops", is_assigned=True))
    assert security.roles["bob"] == ("ops",)
    assert changed_security(security, AssignRole(identity="bob", role="ops", is_assigned=True)) is security
    assert "bob" not in changed_security(security, AssignRole(identity="bob", role="ops", is_assigned=False)).roles
    with pytest.raises(SecurityNotFound):
        changed_security(security, AssignRole(identity="bob", role="dev", is_assigned=False))


# ---- in the metadata ----


def metadata(quota: Quota | None = None) -> Metadata:
    state = Metadata(cluster_id="c", feature_level=LATEST_LEVEL)
    state.apply(EnableSecurity(token=token("first", "admin")))
    if quota is not None:
        state.apply(SetQuota(identity="alice", quota=quota))
    return state


def create(name: str, owner: str = "alice", *, subject: str = "a.>", max_bytes: int | None = None) -> CreateStream:
    return CreateStream(
        name=name,
        id=StreamId(f"id-{name}"),
        settings=StreamSettings(subject=subject, max_bytes=max_bytes, replicas=2),
        created_us=0,
        placement=(BrokerId(1), BrokerId(2)),
        owner=owner,
    )


def test_the_state_is_stored_with_security_and_without() -> None:
    state = metadata(Quota(streams=3))
    state.apply(create("a"))
    assert decode_state(encode_state(state)) == state
    plain = Metadata(cluster_id="c")
    assert b"security" not in encode_state(plain)
    assert b"owner" not in encode_proposal(Proposal(id="x", command=create("a", "")))
    proposal = Proposal(id="x", command=SetQuota(identity="*", quota=None))
    assert decode_proposal(encode_proposal(proposal)) == proposal


def test_quota_of_streams() -> None:
    state = metadata(Quota(streams=1))
    assert state.apply(create("a"))
    assert not state.apply(create("a")), "the same again is no second stream"
    with pytest.raises(StorageQuotaExceeded, match="may have 1"):
        state.apply(create("b"))
    assert state.apply(create("c", "bob"))


def test_quota_of_bytes_counts_replicas_and_edits() -> None:
    state = metadata(Quota(stored_bytes=1000))
    with pytest.raises(StorageQuotaExceeded, match="max_bytes"):
        state.apply(create("a"))
    assert state.apply(create("a", max_bytes=300))
    with pytest.raises(StorageQuotaExceeded, match="600"):
        state.apply(create("b", max_bytes=201))
    assert state.apply(create("b", max_bytes=200))
    wider = StreamSettings(subject="a.>", max_bytes=301, replicas=2)
    with pytest.raises(StorageQuotaExceeded):
        state.apply(EditStream(name="a", settings=wider, changed=("max_bytes",)))
    with pytest.raises(StorageQuotaExceeded):
        state.apply(EditStream(name="a", settings=StreamSettings(subject="a.>", replicas=2), changed=("max_bytes",)))
    smaller = StreamSettings(subject="a.>", max_bytes=100, replicas=2)
    assert state.apply(EditStream(name="a", settings=smaller, changed=("max_bytes",)))


def test_quota_of_bytes_counts_replicas_that_are_added_later() -> None:
    state = metadata(Quota(stored_bytes=1000))
    for number in range(1, 5):
        state.brokers[BrokerId(number)] = BrokerRecord(id=BrokerId(number), url=f"http://b{number}:9292")
    state.apply(create("a", max_bytes=300))
    four, three = tuple(map(BrokerId, (1, 2, 3, 4))), tuple(map(BrokerId, (1, 2, 3)))
    with pytest.raises(StorageQuotaExceeded, match="1200"):
        state.apply(ResizeReplicas(name="a", target=four, min_isr=2))
    assert state.apply(ResizeReplicas(name="a", target=three, min_isr=2))
    with pytest.raises(StorageQuotaExceeded, match="already take 900"):
        state.apply(create("b", max_bytes=51))
    wider = StreamSettings(subject="a.>", max_bytes=400, replicas=2)
    with pytest.raises(StorageQuotaExceeded, match="1200"):
        state.apply(EditStream(name="a", settings=wider, changed=("max_bytes",)))


def test_subjects_before_an_edit_are_kept() -> None:
    state = metadata()
    state.apply(create("a"))
    for subject in ("b.>", "c", "b.>"):
        state.apply(EditStream(name="a", settings=StreamSettings(subject=subject, replicas=2), changed=("subject",)))
    assert state.streams["a"].recorded_subjects == ("b.>", "a.>", "b.>", "c")
    for number in range(40):
        settings = StreamSettings(subject=f"x.{number}", replicas=2)
        state.apply(EditStream(name="a", settings=settings, changed=("subject",)))
    assert len(state.streams["a"].former_subjects) <= 16
    assert ">" in state.streams["a"].former_subjects, "too many to name: it may have recorded anything"
