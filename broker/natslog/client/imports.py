"""The client's calls of exports and imports: stored batches as they are, and streams that begin with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from natslog.client.asking import Asker, Facts
from natslog.client.streams import stream_path
from natslog.errors import CorruptAnswer, CorruptLog, StreamRecreated
from natslog.model import Fork

if TYPE_CHECKING:
    from natslog.arrow.batch_line import BatchHeader

_TIMEOUT_S = 120.0


class ImportCalls(Asker):
    """A part of `NatslogClient`."""

    def stored_batches(
        self, name: str, start: int, end: int, *, expected_id: str
    ) -> list[tuple[BatchHeader, memoryview]]:
        """The batches that cover the committed range, byte for byte as they are stored, proven by their CRCs. All of
        them are in memory.

        Raises:
            OffsetOutOfRange, StreamNotFound, StreamRecreated, CorruptLog, Forbidden, BrokerUnavailable.
        """
        from natslog.client.answers import RequestedRows, stored_of

        asked = RequestedRows(name, start, end, None, is_filtered=False)
        query = {"start": start, "end": end, "exact": "false"}
        ask = partial(self._ask, "GET", f"{stream_path(name)}/messages", query=query, timeout_s=_TIMEOUT_S)
        response = ask()
        try:
            found = stored_of(response, asked)
        except (CorruptLog, CorruptAnswer):  # damaged on the network, or by that broker: another one shows which
            response = ask(prefer=self.servers[1:])
            found = stored_of(response, asked)
        if response.headers.get("Natslog-Stream-Id") != expected_id:
            raise StreamRecreated(f"stream {name!r} was deleted and created again during the export", stream=name)
        return found

    def begin_import(
        self,
        name: str,
        *,
        settings: dict[str, Any],
        lineage: Sequence[Fork],
        first_offset: int,
        subjects: Sequence[str],
        jetstream: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Creates a stream that an export is imported into; continues an import that was begun.

        Args:
            jetstream: of a stream of JetStream, what its configuration has beside `settings`.

        Returns:
            `{name, id, state, first_offset, lineage}`.

        Raises:
            StreamConflict: it exists, and nothing can be imported into it. InvalidRequest, NotEnoughBrokers.
        """
        body: dict[str, Any] = {
            "settings": settings,
            "lineage": _plain(lineage),
            "first_offset": first_offset,
            "subjects": list(subjects),
        }
        body |= {} if jetstream is None else {"jetstream": jetstream}
        return self._json("POST", _path(name), Facts, body=body)

    def import_state(self, name: str) -> dict[str, Any]:
        """The same, with `next_offset`: how far the import is, and `newest_timestamp_us`, of its newest message. Raises
        StreamNotFound.
        """
        return self._json("GET", _path(name), Facts)

    def append_import(self, name: str, stream_id: str, batches: bytes) -> int:
        """Appends stored batches at their offsets. Returns the next offset.

        Raises:
            StreamConflict, StreamRecreated, OffsetOutOfRange, InvalidRequest, StorageFull, BrokerUnavailable.
        """
        query = {"id": stream_id}
        asked = {"query": query, "body": memoryview(batches), "timeout_s": _TIMEOUT_S}
        return int(self._json("PUT", _path(name), Facts, **asked)["next_offset"])

    def removals(self, name: str, start: int, end: int) -> dict[str, str]:
        """Offsets in `[start, end)` that the stream does not have any more, as Roaring bitmaps in base64: `removed`,
        and those of them that were erased, `erased_subjects` and `erased_keys`.

        Raises:
            StreamNotFound, Forbidden: the identity may not read all of the stream.
        """
        query = {"start": start, "end": end}
        return self._json("GET", f"{stream_path(name)}/removed", Facts, query=query, timeout_s=_TIMEOUT_S)

    def remove_imported(self, name: str, stream_id: str, removals: dict[str, str]) -> None:
        """Removes messages that are imported already: those that `removals` of the original has stated.

        Raises:
            StreamConflict, StreamRecreated.
        """
        body = {"id": stream_id, "removals": removals}
        self._json("POST", f"{_path(name)}/removed", Facts, body=body, timeout_s=_TIMEOUT_S)

    def import_consumers(self, name: str, stream_id: str, consumers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Durable consumers of a JetStream stream, in place of those of an earlier call.

        Returns:
            `{imported: [name], refused: [{name, reason}]}`.

        Raises:
            StreamConflict: the stream was resumed. StreamRecreated.
        """
        body = {"id": stream_id, "consumers": list(consumers)}
        return self._json("POST", f"{_path(name)}/consumers", Facts, body=body, timeout_s=_TIMEOUT_S)

    def finish_import(
        self, name: str, stream_id: str, *, lineage: Sequence[Fork], resume: bool = False
    ) -> dict[str, Any]:
        """All is appended. Raises StreamConflict, StreamRecreated."""
        body = {"id": stream_id, "lineage": _plain(lineage), "resume": resume}
        return self._json("POST", f"{_path(name)}/finish", Facts, body=body)

    def stored_security(self) -> dict[str, Any]:
        """`{enabled, security}`: tokens (digests only), roles, rules and quotas, as they are stored."""
        return self._json("GET", "/v1/security", Facts)

    def restore_security(self, security: dict[str, Any]) -> dict[str, Any]:
        """Adds what does not exist. Returns how many of each were added. Raises InvalidRequest, SecurityConflict."""
        body = {"enabled": True, "security": security}
        return self._json("POST", "/v1/security", Facts, body=body, timeout_s=_TIMEOUT_S)


def _plain(lineage: Sequence[Fork]) -> list[dict[str, Any]]:
    return [{"id": fork.id, "offset": fork.offset} for fork in lineage]


def _path(name: str) -> str:
    return f"{stream_path(name)}/import"
