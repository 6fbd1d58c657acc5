"""The calls of the HTTP API, a row each: path, handler, access, and the types of what it takes and answers.

Routes, access checks, the reading of requests (`endpoint`) and `/openapi.json` follow from this table. A new call is a
row here and the function that it names.
"""

from __future__ import annotations

from natslog.http import (
    appends,
    cluster,
    console,
    copies,
    cursors,
    erasures,
    imports,
    many_streams,
    messages,
    metrics,
    overview,
    plans,
    publishing,
    purging,
    ranges,
    read_plans,
    search,
    security,
    sessions,
    status,
    streams,
    subjects,
    tail,
    upkeep,
)
from natslog.http.access import Access
from natslog.http.answer_parts import ARROW_STREAM, NDJSON
from natslog.http.endpoint import BY_LEADER, CHANGE, OFFSET, STATED, Endpoint, header
from natslog.http.shapes import streams as of_streams
from natslog.http.shapes.common import Name, Offset
from natslog.node.peers.handshake import LINK_PATH

# ---- access ----

_OPEN, _CREDENTIALS, _CHECKED = Access("open"), Access("credentials"), Access("checked")
_SIGNS_IN, _READS_SEVERAL = Access("open", changes=True), Access("checked", changes=False)
_MONITOR, _ADMIN = Access("cluster", "monitor"), Access("cluster", "admin")
_SEE, _READ, _PUBLISH = Access("stream"), Access("stream", "read"), Access("stream", "publish")
_MANAGE, _ADMIN_OF_STREAM = Access("stream", "manage"), Access("stream", "admin")
_CURSOR = Access("stream", "cursor", parameter="stream")

# ---- statuses of errors, besides those of every call ----

_METADATA_LEADER = (307, 421)

# ---- sizes of bodies ----

_MIB = 1024 * 1024
_MANY_BYTES, _MESSAGE_BYTES, _COMMIT_BYTES, _SECURITY_BYTES = 4 * _MIB, 12 * _MIB, 16 * _MIB, 16 * _MIB
_CONSUMERS_BYTES = 64 * _MIB

# ---- headers ----

_MAYBE_STATED = {name: stated | {"required": False} for name, stated in STATED.items()}
_CURRENT = {
    "Natslog-Current": header(
        "false: no majority confirmed that this broker has all changes; the answer may be outdated", {"type": "boolean"}
    )
}
_OF_MESSAGES = STATED | {
    "Natslog-Next-Offset": header("start of the next request", OFFSET),
    "Natslog-High-Watermark": header("offset after the last committed message", OFFSET),
    "Natslog-Log-Start-Offset": header("first offset of the log", OFFSET),
    "Natslog-Limited": header(
        "true: rows are left out on whose subjects the identity may not read", {"enum": ["true"]}, required=False
    ),
    "Natslog-Removed": header("offsets of the range whose messages were removed; absent: 0", OFFSET, required=False),
    "Natslog-As-Of": header("of a view: the high watermark that it is of", OFFSET, required=False),
    "Natslog-Batches": header("whole: stored batches, not cut", {"enum": ["whole", "columns", "exact"]}),
}
_WHOLE_BATCHES = {
    "Natslog-Batches": {"description": "as exact=false", "schema": {"enum": ["whole"]}},
    "Natslog-Columns": {
        "description": "stored columns may be returned whole, too",
        "schema": {"enum": ["whole"]},
    },
}

# ---- the calls ----

_OF_CLUSTER = (
    Endpoint("GET /v1/cluster", cluster.show_cluster, _CREDENTIALS),
    Endpoint("GET /v1/overview", overview.overview, _MONITOR),
    Endpoint("GET /v1/live", overview.live, _MONITOR, kinds=("text/event-stream",), errors=(503,)),
    Endpoint("GET /v1/history", overview.history, _MONITOR, errors=(404,)),
    Endpoint("GET /v1/cluster/plan", plans.plan, _MONITOR, errors=(503,)),
    Endpoint("POST /v1/cluster/brokers", cluster.add_broker, _ADMIN, status=201, errors=(*_METADATA_LEADER, 409)),
    Endpoint("PATCH /v1/cluster/brokers/{id}", cluster.drain_broker, _ADMIN, errors=_METADATA_LEADER, takes_id=True),
    Endpoint(
        "DELETE /v1/cluster/brokers/{id}",
        cluster.remove_broker,
        _ADMIN,
        status=204,
        errors=_METADATA_LEADER,
        takes_id=True,
    ),
    Endpoint("GET /v1/cluster/log-level", cluster.show_log_levels, _ADMIN),
    Endpoint("PUT /v1/cluster/log-level", cluster.set_log_level, _ADMIN),
    Endpoint("POST /v1/cluster/finalize-upgrade", cluster.finalize_upgrade, _ADMIN, errors=(*_METADATA_LEADER, 409)),
    Endpoint("POST /v1/cluster/transfer", cluster.transfer, _ADMIN, status=202, errors=_METADATA_LEADER),
    Endpoint(
        "POST /v1/streams/{name}/leader", cluster.transfer_stream, _ADMIN_OF_STREAM, errors=BY_LEADER, takes_id=True
    ),
    Endpoint("GET /v1/streams/{name}/replicas", copies.replicas, _SEE, is_stated=True),
    Endpoint("PUT /v1/streams/{name}/replicas", cluster.move_stream, _ADMIN_OF_STREAM, status=202, takes_id=True),
    Endpoint(f"POST {LINK_PATH}", cluster.introduce, Access("peers"), is_public=False, ignores_unknown=True),
    Endpoint(f"GET {LINK_PATH}", cluster.link, Access("peers"), is_public=False, ignores_unknown=True),
)

_OF_STREAMS = (
    Endpoint("GET /v1/streams", streams.list_streams, _CHECKED, headers=_CURRENT),
    Endpoint(
        "POST /v1/streams",
        streams.create_stream,
        _CHECKED,
        status=201,
        also=(200,),
        body_shown_as=of_streams.NewStream,
        errors=(404,),
        takes_id=True,
    ),
    Endpoint("GET /v1/streams/{name}", streams.show_stream, _SEE, headers=_MAYBE_STATED, errors=BY_LEADER),
    Endpoint(
        "PATCH /v1/streams/{name}", streams.edit_stream, _MANAGE, body_shown_as=of_streams.ChangedStream, takes_id=True
    ),
    Endpoint("DELETE /v1/streams/{name}", streams.delete_stream, _MANAGE, status=204, takes_id=True),
    Endpoint("POST /v1/streams/{name}/roll", upkeep.roll_stream, _MANAGE, errors=(409,), is_stated=True),
    Endpoint("GET /v1/streams/{name}/scrub", upkeep.show_scrub, _SEE),
    Endpoint("POST /v1/streams/{name}/scrub", upkeep.begin_scrub, _MANAGE, status=202),
    Endpoint("POST /v1/streams/{name}/repair", upkeep.repair_stream, _MANAGE),
    Endpoint(
        "POST /v1/streams/{name}/purge",
        purging.purge_stream,
        _MANAGE,
        body_is_required=False,
        errors=(416,),
        takes_id=True,
        is_stated=True,
    ),
    Endpoint(
        "DELETE /v1/streams/{name}/messages/{offset}", purging.delete_message, _MANAGE, errors=CHANGE, is_stated=True
    ),
    Endpoint("GET /v1/streams/{name}/erase", erasures.show_erasure, _MANAGE),
    Endpoint(
        "POST /v1/streams/{name}/erase",
        erasures.erase,
        _MANAGE,
        status=202,
        body_kept="unlogged",
        errors=CHANGE,
        is_stated=True,
    ),
    Endpoint("POST /v1/streams/{name}/seal", streams.seal_stream, _MANAGE, takes_id=True, is_stated=True),
    Endpoint("GET /v1/streams/{name}/segments", copies.segments, _READ, is_stated=True),
)

_OF_MESSAGES_AND_RANGES = (
    Endpoint(
        "GET /v1/streams/{name}/messages",
        messages.messages,
        _READ,
        kinds=(ARROW_STREAM, NDJSON),
        headers=_OF_MESSAGES,
        accepts=_WHOLE_BATCHES,
        errors=(*BY_LEADER, 409, 416),
        answers_head=False,
    ),
    Endpoint(
        "GET /v1/streams/{name}/tail",
        tail.tail,
        _READ,
        kinds=(ARROW_STREAM,),
        headers={"Natslog-Batches": header("columns: each message states its offsets", {"enum": ["columns"]})},
        errors=(409, 416),
        is_stated=True,
        answers_head=False,
    ),
    Endpoint("GET /v1/streams/{name}/subjects", subjects.subjects, _READ, errors=(409,), is_stated=True),
    Endpoint("GET /v1/streams/{name}/search", search.search, _READ, errors=(416,), is_stated=True),
    Endpoint("GET /v1/streams/{name}/offsets", ranges.first_offset, _READ, is_stated=True),
    Endpoint("GET /v1/streams/{name}/splits", ranges.splits, _READ, errors=(416,), is_stated=True),
    Endpoint("GET /v1/streams/{name}/extent", ranges.extent, _READ, errors=(416,), is_stated=True),
    Endpoint(
        "POST /v1/positions",
        many_streams.positions,
        _READS_SEVERAL,
        headers=_CURRENT,
        most_bytes=_MANY_BYTES,
        body_kept="no",
    ),
    Endpoint("POST /v1/splits", many_streams.splits, _READS_SEVERAL, most_bytes=_MANY_BYTES, body_kept="no"),
    Endpoint(
        "POST /v1/plans",
        read_plans.plans,
        _READS_SEVERAL,
        headers=_CURRENT,
        most_bytes=_MANY_BYTES,
        body_kept="no",
        errors=(404,),
    ),
    Endpoint(
        "POST /v1/streams/{name}/publish",
        publishing.publish,
        _PUBLISH,
        status=201,
        most_bytes=_MESSAGE_BYTES,
        body_kept="no",
        errors=(404, 502, 503),
    ),
    Endpoint(
        "POST /v1/streams/{name}/redrive",
        publishing.redrive,
        Access("stream", "read", changes=True),
        errors=(416, 502, 503),
        is_stated=True,
    ),
    Endpoint("GET /v1/streams/{name}/appends", appends.last_batches, _PUBLISH, errors=BY_LEADER),
    Endpoint("GET /v1/streams/{name}/appends/{producer}", appends.last_batch, _PUBLISH, errors=BY_LEADER),
    Endpoint(
        "POST /v1/streams/{name}/appends/{producer}/{batch}",
        appends.commit_batch,
        _PUBLISH,
        most_bytes=_COMMIT_BYTES,
        body_kept="unlogged",
        errors=(*BY_LEADER, 409),
    ),
    Endpoint(
        "POST /v1/streams/{name}/appends/{producer}/{batch}/rows",
        appends.append_rows,
        _PUBLISH,
        body_shown_as=ARROW_STREAM,
        errors=(*BY_LEADER, 409),
    ),
    Endpoint(
        "DELETE /v1/streams/{name}/appends/{producer}/{batch}", appends.abort, _PUBLISH, status=204, errors=BY_LEADER
    ),
    Endpoint(
        "PUT /v1/streams/{name}/appends/{producer}/{batch}/parts/{part}",
        appends.stage,
        _PUBLISH,
        body_shown_as=ARROW_STREAM,
        errors=BY_LEADER,
    ),
)

_OF_CURSORS = (
    Endpoint("GET /v1/streams/{name}/lag", cursors.stream_lag, _READ, is_stated=True),
    Endpoint("POST /v1/lags", cursors.lags, _READS_SEVERAL, body_shown_as=dict[Name, Offset]),
    Endpoint("GET /v1/cursors", cursors.list_cursors, _CHECKED),
    Endpoint(
        "POST /v1/cursors",
        cursors.set_cursors,
        Access("checked", "cursor"),
        most_bytes=_MANY_BYTES,
        errors=(404,),
        takes_id=True,
    ),
    Endpoint("GET /v1/cursors/{consumer}/{stream}", cursors.show_cursor, Access("stream", parameter="stream")),
    Endpoint("PUT /v1/cursors/{consumer}/{stream}", cursors.set_cursor, _CURSOR, takes_id=True),
    Endpoint("DELETE /v1/cursors/{consumer}/{stream}", cursors.drop_cursor, _CURSOR, status=204, takes_id=True),
)

_OF_IMPORTS = (
    Endpoint("GET /v1/streams/{name}/import", imports.show_import, _ADMIN, errors=BY_LEADER),
    Endpoint(
        "POST /v1/streams/{name}/import",
        imports.begin_import,
        _ADMIN,
        status=201,
        also=(200,),
        errors=(404,),
        takes_id=True,
    ),
    Endpoint(
        "PUT /v1/streams/{name}/import",
        imports.append_import,
        Access("cluster", "admin", changes=False),
        body_shown_as=ARROW_STREAM,
        errors=(*BY_LEADER, 409, 416),
    ),
    Endpoint(
        "POST /v1/streams/{name}/import/removed",
        imports.remove_imported,
        _ADMIN,
        most_bytes=imports.MOST_BYTES,
        body_kept="no",
        errors=(*BY_LEADER, 409),
    ),
    Endpoint("GET /v1/streams/{name}/removed", imports.show_removed, _READ, errors=(416,), is_stated=True),
    Endpoint(
        "POST /v1/streams/{name}/import/consumers",
        imports.import_consumers,
        _ADMIN,
        most_bytes=_CONSUMERS_BYTES,
        body_kept="no",
        errors=(*BY_LEADER, 409),
    ),
    Endpoint("POST /v1/streams/{name}/import/finish", imports.finish_import, _ADMIN, errors=BY_LEADER, takes_id=True),
)

_OF_SECURITY = (
    Endpoint("GET /v1/security", imports.show_security, _ADMIN),
    Endpoint(
        "POST /v1/security",
        imports.restore_security,
        _ADMIN,
        most_bytes=_SECURITY_BYTES,
        body_kept="no",
        errors=(404, *CHANGE),
    ),
    Endpoint("GET /v1/whoami", security.whoami, _CREDENTIALS),
    Endpoint(f"GET {sessions.SESSION_PATH}", sessions.shown, _OPEN),
    Endpoint(f"POST {sessions.SESSION_PATH}", sessions.sign_in, _SIGNS_IN, status=201, body_kept="no"),
    Endpoint(f"DELETE {sessions.SESSION_PATH}", sessions.sign_out, _SIGNS_IN, status=204),
    Endpoint("GET /v1/tokens", security.list_tokens, _ADMIN),
    Endpoint("POST /v1/tokens", security.create_token, _ADMIN, status=201, takes_id=True),
    Endpoint("DELETE /v1/tokens/{token}", security.revoke_token, _ADMIN, status=204, takes_id=True),
    Endpoint("GET /v1/acl", security.list_rules, _ADMIN),
    Endpoint("POST /v1/acl", security.add_rule, _ADMIN, status=201, also=(200,), errors=(404,), takes_id=True),
    Endpoint("DELETE /v1/acl/{rule:r[0-9]+}", security.drop_rule, _ADMIN, status=204, takes_id=True),
    Endpoint("GET /v1/acl/check", security.check_rule, _CREDENTIALS),
    Endpoint("GET /v1/roles", security.list_roles, _ADMIN),
    Endpoint("PUT /v1/roles/{role}", security.assign_role, _ADMIN, takes_id=True),
    Endpoint("DELETE /v1/roles/{role}", security.unassign_role, _ADMIN, takes_id=True),
    Endpoint("GET /v1/quotas", security.list_quotas, _ADMIN),
    Endpoint("PUT /v1/quotas", security.set_quota, _ADMIN, takes_id=True),
    Endpoint("DELETE /v1/quotas", security.drop_quota, _ADMIN, status=204, errors=(404,), takes_id=True),
)

_OTHERS = (
    Endpoint("GET /healthz", status.healthz, _OPEN, ignores_unknown=True),
    Endpoint("GET /readyz", status.readyz, _OPEN, also=(503,), ignores_unknown=True),
    Endpoint("GET /metrics", metrics.metrics, _MONITOR, kinds=("text/plain",), ignores_unknown=True),
    Endpoint("GET /", console.page, _OPEN, kinds=("text/html",), ignores_unknown=True),
    Endpoint("GET /console/{path:.+}", console.file, _OPEN, kinds=("*/*",), errors=(404,), ignores_unknown=True),
    Endpoint("GET /openapi.json", status.openapi, _OPEN, ignores_unknown=True),
)

ENDPOINTS = (
    *_OF_CLUSTER,
    *_OF_STREAMS,
    *_OF_MESSAGES_AND_RANGES,
    *_OF_CURSORS,
    *_OF_IMPORTS,
    *_OF_SECURITY,
    *_OTHERS,
)
"""Every call of the server."""
