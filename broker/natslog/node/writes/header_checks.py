"""What a message's headers request, and the stream does not allow: decided when the message arrives.

Source: JetStream's error numbers and texts (nats-server, `server/errors.json`, `server/stream.go`).
"""

from __future__ import annotations

import json

from natslog.errors import ConditionFailed, InvalidRequest, NatslogError, PublishRefused, RollupRefused
from natslog.ingest import conditions
from natslog.log.expiry import ttl_s
from natslog.log.rollups import ALL, SUBJECT, rollup_of
from natslog.model import StreamSettings


def refusal_of(demands: dict[str, str], stream: str, settings: StreamSettings) -> NatslogError | None:
    """Why a message with these headers is not stored; None if it may be."""
    expectations = [name for name in demands if name.startswith(conditions.EXPECTED_PREFIX)]
    unknown = [name for name in expectations if name not in conditions.KNOWN_EXPECTATIONS]
    if unknown:
        return InvalidRequest(f"natslog does not check the header {unknown[0]}: leave it out")
    if demands.get(conditions.EXPECTED_STREAM, "") not in ("", stream):
        return ConditionFailed("expected stream does not match", err_code=10060, stream=stream)
    if ttl := demands.get(conditions.TTL):
        if ttl_s(ttl) is None:
            return PublishRefused("invalid per-message TTL", err_code=10165, stream=stream)
        if not settings.allow_ttl:
            return PublishRefused("per-message TTL is disabled", err_code=10166, stream=stream)
    if rollup := demands.get(conditions.ROLLUP):
        if not settings.allow_rollup:
            return rollup_not_permitted()
        if (value := rollup_of(rollup)) not in (SUBJECT, ALL):
            return _rollup_refused(f"rollup value invalid: {json.dumps(value, ensure_ascii=False)}")
    return None


def feature_refusals(stream: str) -> tuple[PublishRefused, ...]:
    """For the features of `conditions.marked_features`, in their order: the answers of JetStream without them."""
    texts = (
        (10174, "atomic publish is disabled"),
        (10188, "message schedules is disabled"),
        (10168, "message counters is disabled"),
    )
    return tuple(PublishRefused(text, err_code=err_code, stream=stream) for err_code, text in texts)


def fast_batch_refusal(stream: str) -> PublishRefused:
    return PublishRefused("batch publish is disabled", err_code=10205, stream=stream)


def rollup_not_permitted() -> RollupRefused:
    return _rollup_refused("rollup not permitted")


def _rollup_refused(why: str) -> RollupRefused:
    return RollupRefused(why, err_code=10111)
