"""The schemas that Avro payloads were written with: from a schema registry, or from the files of a folder.

A registry has the API of Confluent's: `GET /schemas/ids/7`, `GET /subjects/orders-value/versions/latest`. In a folder,
`7.avsc` is the schema with the id 7, and every `.avsc` file is found by its fingerprint too.

Invariant. A schema with an id never changes, so each one is asked for once in a process. One that is not known is asked
for again after `_AGAIN_S`.
"""

from __future__ import annotations

import json
import threading
import time
from base64 import b64encode
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import urllib3

from natslog.client.credentials import origin_of
from natslog.errors import ConfigError, InvalidRequest, NatslogError
from natslog.urls import without_secrets
from pyspark_natslog.payload.schema_text import PayloadSchema, parse_payload_schema

_AGAIN_S = 10.0
_WITHIN_S = 10.0
_TRIES = 4
_MOST_BYTES = 16 * 1024 * 1024
_MOST_FILES = 10_000
_MOST_MISSING = 10_000
_PIECE_BYTES = 64 * 1024
_NOT_FOUND, _REFUSED = 404, (400, 422)
_UNKNOWN = (404, 40401, 40402, 40403)  # of Confluent's API: subject, version, schema
_IDS = 2**31
_ENDING = ".avsc"


class RegistryUnavailable(NatslogError):
    """The schema registry does not answer, or answers with an error."""

    code, status, retriable = "registry_unavailable", 503, True


@dataclass(frozen=True, slots=True)
class SchemaRegistry:
    """Where schemas are found. Picklable; tasks read the files.

    Attributes:
        place: a URL or a folder. `auth_file`: one line, `user:password` or a bearer token. `ca_file`: the CA
            certificates that are accepted; None: those of the system.
    """

    place: str = field(repr=False)
    auth_file: str | None = None
    ca_file: str | None = None

    @property
    def shown(self) -> str:
        return without_secrets(self.place) if self._is_url else self.place

    @property
    def _is_url(self) -> bool:
        return "://" in self.place

    def check(self) -> None:
        """Raises ConfigError: it is neither a URL nor a folder that can be read."""
        if self._is_url:
            if origin_of(self.place) is None or without_secrets(self.place) != self.place:
                raise ConfigError(
                    f"option schemaRegistry {self.shown!r} must be an http(s) URL without user and password (they "
                    "belong in schemaRegistryAuthFile), or a folder with .avsc files",
                    option="schemaRegistry",
                )
        elif not Path(self.place).is_dir():
            raise ConfigError(
                f"option schemaRegistry: {self.place} is not a folder: give one with .avsc files, or a URL",
                option="schemaRegistry",
            )
        if self.auth_file is not None:
            self._headers()
        if self.ca_file is not None and not Path(self.ca_file).is_file():
            raise ConfigError(
                f"option schemaRegistryCaFile: there is no file {self.ca_file}", option="schemaRegistryCaFile"
            )

    def answers(self) -> None:
        """Raises RegistryUnavailable: it does not; ConfigError: it requires credentials."""
        if self._is_url and self._get("/subjects?limit=1") is None:
            raise RegistryUnavailable(f"the schema registry {self.shown} has no list of subjects: check its URL")

    def latest(self, subject: str) -> str:
        """The newest schema of a subject, as text.

        Raises:
            ConfigError: there is no such subject, or this is a folder. RegistryUnavailable.
        """
        if not self._is_url:
            raise ConfigError("option payloadSchema: subject:NAME requires the URL of a schema registry")
        found = self._get(f"/subjects/{_in_path(subject)}/versions/latest")
        if found is None:
            raise ConfigError(f"the schema registry {self.shown} has no subject {subject!r}: correct payloadSchema")
        return _avro_text(found, f"subject {subject}")

    def by_id(self, schema_id: int) -> PayloadSchema | None:
        """The schema; None if it is not known.

        Raises:
            InvalidRequest: it is no Avro schema that can be read. RegistryUnavailable.
        """
        return _cache.found(self, schema_id)

    def by_fingerprint(self, fingerprint: int) -> PayloadSchema | None:
        """Of a folder's schemas; None if none has it, or this is a registry, which has no fingerprints."""
        return None if self._is_url else _cache.files(self).get(fingerprint)

    def load(self, schema_id: int) -> PayloadSchema | None:
        """As `by_id`, without the cache."""
        if self._is_url:
            body = self._get(f"/schemas/ids/{schema_id}") if schema_id < _IDS else None
            return None if body is None else parse_payload_schema(_avro_text(body, f"schema {schema_id}"))
        path = Path(self.place) / f"{schema_id}{_ENDING}"
        if not path.exists():
            return None
        try:
            return parse_payload_schema(str(path.absolute()))
        except InvalidRequest as error:
            raise InvalidRequest(f"{path} is no Avro schema: {error.message}") from error

    def load_files(self) -> dict[int, PayloadSchema]:
        """The schemas of a folder by fingerprint. Files that are no schema are left out."""
        found = {}
        for path in sorted(Path(self.place).glob(f"*{_ENDING}"))[:_MOST_FILES]:
            try:
                schema = parse_payload_schema(str(path.absolute()))
            except InvalidRequest:
                continue
            found[schema.fingerprint] = schema
        return found

    def _headers(self) -> dict[str, str]:
        if self.auth_file is None:
            return {}
        try:
            text = Path(self.auth_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read schemaRegistryAuthFile {self.auth_file}: {error}") from error
        if not text or len(text.splitlines()) > 1:
            raise ConfigError(f"schemaRegistryAuthFile {self.auth_file} must be one line: user:password, or a token")
        if not text.isascii():
            raise ConfigError(f"schemaRegistryAuthFile {self.auth_file} has characters that are not ASCII")
        if ":" in text:
            return {"Authorization": f"Basic {b64encode(text.encode()).decode()}"}
        return {"Authorization": f"Bearer {text}"}

    def _get(self, path: str) -> dict[str, Any] | list[Any] | None:
        """An answer's body; None where there is no such thing."""
        problem = ""
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(0.2 * 2**attempt)
            try:
                status, data = self._answer(path)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                problem = str(error.args[-1] if error.args else error)
                continue
            body = _json(data)
            if status == 200 and isinstance(body, dict | list):
                return body
            if _is_unknown(path, status, body):
                return None
            if status in (401, 403):
                raise ConfigError(
                    f"the schema registry {self.shown} refuses access (HTTP {status}): set schemaRegistryAuthFile",
                    option="schemaRegistryAuthFile",
                )
            problem = "the answer is not JSON" if status == 200 else f"it answered HTTP {status}"
            problem += ": check that the URL is that of a schema registry"
            if 300 <= status < 500:  # it will not change
                break
        raise RegistryUnavailable(f"the schema registry {self.shown} cannot be read: {problem}", url=self.shown)

    def _answer(self, path: str) -> tuple[int, bytes]:
        """(status, body). Raises HTTPError or OSError: it is not there within the time limit, or is too large."""
        until_s, data = time.monotonic() + _WITHIN_S, bytearray()
        answer = _pool(self.ca_file).request(
            "GET", self.place.rstrip("/") + path, headers=self._headers(), timeout=_WITHIN_S, preload_content=False
        )
        try:
            while piece := answer.read1(_PIECE_BYTES):
                data += piece
                if time.monotonic() > until_s:
                    raise TimeoutError(f"the answer is not complete after {_WITHIN_S:.0f} s")
                if len(data) > _MOST_BYTES:
                    raise OSError(f"the answer is larger than {_MOST_BYTES} bytes")
        except BaseException:
            answer.close()
            raise
        answer.release_conn()
        return answer.status, bytes(data)


@cache
def _pool(ca_file: str | None) -> urllib3.PoolManager:
    """Connections of this process, for one file of CA certificates."""
    return urllib3.PoolManager(ca_certs=ca_file, retries=False)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _is_unknown(path: str, status: int, body: Any) -> bool:
    """Whether a registry states that it has no such schema. Other servers answer 404, too."""
    if status == _NOT_FOUND:
        return isinstance(body, dict) and body.get("error_code") in _UNKNOWN
    return path.startswith("/schemas/ids/") and status in _REFUSED and isinstance(body, dict)


def _avro_text(body: dict[str, Any] | list[Any], what: str) -> str:
    """The schema in an answer. Raises InvalidRequest: it is of another kind."""
    if not isinstance(body, dict) or not isinstance(body.get("schema"), str):
        raise InvalidRequest(f"{what} of the schema registry has no schema in its answer")
    kind = body.get("schemaType", "AVRO")
    if kind != "AVRO":
        raise InvalidRequest(f"{what} of the schema registry is {kind}, not AVRO")
    if not body["schema"].lstrip().startswith(("{", "[", '"')):  # it could be the path of a file of this machine
        raise InvalidRequest(f"{what} of the schema registry is not JSON")
    if body.get("references"):
        raise InvalidRequest(f"{what} of the schema registry refers to other schemas, which is not supported")
    return str(body["schema"]).strip()


def _in_path(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


class _Cache:
    """Of all tasks of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[str, int], PayloadSchema] = {}
        self._missing_until_s: dict[tuple[str, int], float] = {}
        self._unreadable: dict[tuple[str, int], InvalidRequest] = {}
        self._files: dict[str, tuple[float, dict[int, PayloadSchema]]] = {}

    def found(self, registry: SchemaRegistry, schema_id: int) -> PayloadSchema | None:
        key = registry.place, schema_id
        with self._lock:
            if key in self._found:
                return self._found[key]
            if time.monotonic() < self._missing_until_s.get(key, 0.0):
                return None
            if (known := self._unreadable.get(key)) is not None:
                raise known
        try:
            schema = registry.load(schema_id)
        except InvalidRequest as error:
            with self._lock:
                if "://" in registry.place:  # a file may be corrected
                    self._unreadable[key] = error
            raise
        now_s = time.monotonic()
        with self._lock:
            if schema is not None:
                self._found[key] = schema
            else:
                if len(self._missing_until_s) >= _MOST_MISSING:
                    self._missing_until_s = {one: at for one, at in self._missing_until_s.items() if at > now_s}
                self._missing_until_s[key] = now_s + _AGAIN_S
        return schema

    def files(self, registry: SchemaRegistry) -> dict[int, PayloadSchema]:
        with self._lock:
            read_s, found = self._files.get(registry.place, (float("-inf"), {}))
        if time.monotonic() - read_s > _AGAIN_S:
            found = registry.load_files()
            with self._lock:
                self._files[registry.place] = time.monotonic(), found
        return found


_cache = _Cache()
