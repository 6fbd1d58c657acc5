"""Health, readiness, and the description of the API."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from natslog.errors import NotReady, Starting, natslog_version
from natslog.http.access import rights_of
from natslog.http.context import BROKER, DOCUMENT
from natslog.http.endpoint import JSON, PlainCall
from natslog.http.shapes import cluster as shapes
from natslog.http.shapes.common import Answer, shape_response
from natslog.node.replicas.upkeep import clock_warnings


async def healthz(call: PlainCall) -> Answer[shapes.Health]:
    """The process is running"""
    return shape_response(shapes.Health("alive", natslog_version()))


async def readyz(call: PlainCall) -> Answer[shapes.Readiness]:
    """Whether messages are accepted and served

    503 with the reason if not. Streams with problems are named.
    """
    broker = call.request.app[BROKER]
    reason = broker.not_ready_because()
    troubled = {
        name: problem.message
        for name, stream in broker.streams.items()
        if (problem := stream.problem or stream.scrub_problem) is not None
    }
    body = shapes.Readiness(status="ready" if reason is None else "not ready", reason=reason)
    may_see_streams = False
    with suppress(Starting, NotReady):  # who may is not known yet
        may_see_streams = rights_of(call.request).may("monitor")
    if may_see_streams:
        body.streams_with_problems = troubled
        body.has_disk_room = broker.hosting.around.has_disk_room
        body.warnings = clock_warnings(list(broker.streams.values()))
        if not body.has_disk_room:
            body.warnings.append("a disk is full: this broker accepts no messages, and serves those that it has")
        if broker.leaf_state == "down":
            reason = broker.leaf_problem or "it is being connected"
            body.warnings.append(
                f"the leafnode connection to NATS is down, so JetStream consumers get no messages: {reason}"
            )
    return shape_response(body, status=200 if reason is None else 503)


async def openapi(call: PlainCall) -> Answer[dict[str, Any]]:
    """This document"""
    return Answer(body=call.request.app[DOCUMENT], content_type=JSON, charset="utf-8")
