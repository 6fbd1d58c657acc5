"""Outcomes of requests: a retry is applied once within its window, whatever other clients request."""

from __future__ import annotations

import msgspec
import pytest

from natslog.cluster import outcomes
from natslog.cluster.commands import (
    Command,
    CreateStream,
    DeleteStream,
    FinalizeUpgrade,
    PauseStream,
    Proposal,
    SetCursor,
)
from natslog.cluster.encoding import encode_state
from natslog.cluster.metadata import Metadata
from natslog.cluster.outcomes import CURSOR_RETRY_WINDOW_MS, RETRY_WINDOW_MS
from natslog.cluster.security_commands import EnableSecurity, SetQuota
from natslog.model import StreamSettings
from natslog.security.records import Quota, TokenRecord


def state_at() -> Metadata:
    state = Metadata(cluster_id="c")
    state.apply(create("orders", "aa"))
    return state


def create(name: str, stream_id: str) -> CreateStream:
    return CreateStream(name=name, id=stream_id, settings=StreamSettings(subject="x"), created_us=1, placement=(1,))


def ask(proposal_id: str, command: Command, *, client: str = "a", elapsed_ms: int = 0) -> Proposal:
    return Proposal(id=proposal_id, command=command, client=client, elapsed_ms=elapsed_ms)


def toggled(at: int) -> PauseStream:
    return PauseStream(name="orders", paused=at % 2 == 0)


@pytest.mark.parametrize("client", ["a", "b"])
def test_a_retry_after_thousands_of_other_changes_is_applied_once(client: str) -> None:
    """If other outcomes displaced it, the retry would delete the stream that was created since."""
    state = state_at()
    deleting = ask("delete-it", DeleteStream(name="orders", deleted_us=2))
    assert state.decide(deleting).changed
    state.decide(ask("create-again", create("orders", "bb")))
    for at in range(3_000):
        state.decide(ask(f"p{at}", toggled(at), client=client, elapsed_ms=100))
    assert state.decide(deleting).changed, "the outcome of the first time"
    assert state.stream("orders").id == "bb"


def test_an_outcome_is_kept_for_its_window_of_the_logs_own_time() -> None:
    state = state_at()
    assert state.decide(ask("one", toggled(0))).changed
    state.decide(ask("later", toggled(1), elapsed_ms=RETRY_WINDOW_MS))
    assert state.outcome_of("one") is not None
    state.decide(ask("latest", toggled(2), elapsed_ms=1))
    assert state.outcome_of("one") is None
    assert state.answered is not None
    assert state.answered.requests.of_client == {"a": 2}


def test_a_clock_that_goes_back_changes_nothing() -> None:
    state = state_at()
    state.decide(ask("one", toggled(0), elapsed_ms=5))
    state.decide(ask("two", toggled(1), elapsed_ms=-(10**9)))
    assert state.answered is not None
    assert state.answered.now_ms == 5


def test_security_can_be_changed_when_other_clients_have_taken_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "MAX_OUTCOMES", 10)
    state = state_at()
    token = TokenRecord(id="0" * 12, identity="admin", digest="0" * 64, created_us=0)
    state.apply(EnableSecurity(token=token))
    for at in range(11):
        refused = state.decide(ask(f"a{at}", toggled(at), client=f"client-{at}")).error is not None
        assert refused == (at == 10)
    quota = SetQuota(identity="client-1", quota=Quota(requests_per_s=1))
    assert state.decide(ask("b", quota, client="admin")).error is None
    monkeypatch.setattr(outcomes, "RESERVED_OUTCOMES", 1)
    assert state.decide(ask("c", quota, client="admin")).error is not None, "these are bounded, too"


def test_one_client_that_asks_too_often_is_refused_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "MAX_OF_ONE_CLIENT", 10)
    state = state_at()
    for at in range(10):
        assert state.decide(ask(f"a{at}", toggled(at))).error is None
    refused = ask("a10", toggled(10))
    version = state.version
    outcome = state.decide(refused)
    assert outcome.error is not None
    assert (outcome.error["error"]["code"], outcome.error["error"]["retriable"]) == ("overloaded", True)
    assert (state.version, state.outcome_of("a10")) == (version, None), "nothing changed"
    assert state.decide(ask("b0", toggled(0), client="b")).error is None
    assert state.decide(ask("a9", toggled(9))).error is None, "a retry needs no room"
    assert state.decide(msgspec.structs.replace(refused, elapsed_ms=RETRY_WINDOW_MS + 1)).error is None


def test_when_all_room_is_taken_nothing_is_displaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "MAX_OUTCOMES", 10)
    state = state_at()
    for at in range(20):
        state.decide(ask(f"p{at}", toggled(at), client=f"client {at}"))
    assert all(state.outcome_of(f"p{at}") is not None for at in range(10))
    assert all(state.outcome_of(f"p{at}") is None for at in range(10, 20))


def test_background_decisions_leave_no_outcome() -> None:
    """A storm of proposals did not displace outcomes of others then."""
    state = state_at()
    size = len(encode_state(state))
    for _ in range(5_000):
        state.decide(Proposal(id="", command=toggled(1)))
    assert len(encode_state(state)) <= size + 60
    assert state.decide(Proposal(id="", command=toggled(0))).changed, "applied each time"
    assert state.decide(Proposal(id="", command=toggled(1))).changed


def test_cursors_have_a_window_of_their_own() -> None:
    state = state_at()
    state.decide(ask("delete-it", DeleteStream(name="missing", deleted_us=2)))
    for at in range(2_000):
        moved = SetCursor(consumer="c", stream="orders", stream_id="aa", offset=at, set_us=at)
        state.decide(ask(f"c{at}", moved, elapsed_ms=100))
    assert state.answered is not None
    assert len(state.answered.cursors.kept) == CURSOR_RETRY_WINDOW_MS // 100 + 1


def test_the_level_is_never_lowered() -> None:
    state = state_at()
    assert state.apply(FinalizeUpgrade(level=3))
    assert not state.apply(FinalizeUpgrade(level=2))
    assert not state.apply(FinalizeUpgrade(level=3))
    assert state.feature_level == 3
