"""The settings of a natslog stream that continues one of JetStream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from natslog.errors import InvalidRequest
from natslog.jetstream.errors import ApiError
from natslog.jetstream.requests import decoded
from natslog.jetstream.stream_config import StreamConfigRequest, checked, settings_of, unsupported_fields

_NATS_ONLY = ("placement", "persist_mode")
"""Fields that say how the JetStream server stores the stream."""


def settings_from(
    config: dict[str, Any], *, name: str, ignored: Sequence[str] = (), replicas: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings as the HTTP API has them, and the others of the JetStream API.

    Args:
        config: as JetStream states it. `name`: of the natslog stream. `ignored`: fields that are left out.
        replicas: instead of those of the configuration.

    Raises:
        InvalidRequest: natslog has no such stream; the message names the field.
    """
    known = StreamConfigRequest.__struct_fields__
    for field in ignored:
        if field not in known:
            raise InvalidRequest(f"--ignore {field}: a stream of JetStream has no such field")
    config = {field: value for field, value in config.items() if field not in ignored} | {"name": name}
    try:
        request = decoded(msgspec.json.encode(config), StreamConfigRequest)
        if found := unsupported_fields(request):
            raise InvalidRequest(
                f"stream {name!r} has {', '.join(found)}, which natslog does not support: import it without, with "
                + " ".join(f"--ignore {field}" for field in found)
            )
        if replicas is not None:
            request = msgspec.structs.replace(request, num_replicas=replicas)
        settings = settings_of(checked(msgspec.structs.replace(request, sealed=False)))
    except ApiError as error:
        hint = next((f". --ignore {one} leaves it out" for one in _NATS_ONLY if config.get(one)), "")
        raise InvalidRequest(f"stream {name!r} cannot be imported: {error.description}{hint}") from error
    body = settings.to_json()
    body |= {"ttl": settings.ttl_s, "dedupe_window": settings.dedupe_window_s}  # exact
    return body, msgspec.to_builtins(settings.jetstream)
