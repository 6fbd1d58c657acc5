"""A key-value bucket of JetStream as a table: the stream `KV_<bucket>`, whose subjects are `$KV.<bucket>.<key>`.

Theory of operation. A row of the stream is a change of a key. Its subject is the key, its sequence is the revision, and
the header `KV-Operation` states a deletion; without it, the key was put. So the stream is the history of the bucket,
and its latest view (the newest message of each subject) is the bucket itself, in which deleted keys have a marker.

Source: NATS ADR-8, "JetStream based Key-Value Stores".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import DataType, LongType, StringType

from natslog.arrow.schema import rows_of_items
from natslog.errors import ConfigError
from natslog.subjects import includes

BUCKET_COLUMNS = ("key", "revision", "timestamp", "operation", "value")
BUCKET_TYPES: dict[str, DataType] = {"key": StringType(), "revision": LongType(), "operation": StringType()}
BUCKET_METADATA = ("key", "revision", "timestamp", "operation", "headers")

_STORED_AS = {"key": "subject", "revision": "offset", "operation": "headers"}
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,250}")
_PUT = "PUT"
_OPERATION = "KV-Operation"


@dataclass(frozen=True, slots=True)
class Bucket:
    """`with_deleted`: whether deletions (DEL, PURGE) are rows."""

    name: str
    with_deleted: bool

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"option bucket {self.name[:80]!r} is not the name of a bucket: letters, digits, _ and -",
                option="bucket",
            )

    @property
    def stream(self) -> str:
        return f"KV_{self.name}"

    @property
    def subjects(self) -> str:
        return f"$KV.{self.name}.>"

    def check_filter(self, subject: str) -> None:
        """Raises ConfigError: a subject filter that selects other subjects than those of keys."""
        if not includes(self.subjects, subject):
            raise ConfigError(
                f"option subjectFilter {subject!r} has to begin with $KV.{self.name}., as the subjects of the keys of "
                f"bucket {self.name}",
                option="subjectFilter",
            )

    def stored_columns(self, columns: Iterable[str]) -> list[str]:
        """The columns of a stream that these columns are made of."""
        return list(dict.fromkeys(["offset", "headers", *(_STORED_AS.get(name, name) for name in columns)]))

    def rows(self, batch: Any) -> Any:
        """The rows of a stored batch as those of the bucket, as far as it has the columns; and `offset`."""
        operations = operations_of(batch.column("headers"))
        found = {name: batch.column(name) for name in batch.schema.names if name not in ("subject", "key")}
        found |= {"operation": operations, "revision": pc.add(batch.column("offset"), 1)}
        if "subject" in batch.schema.names:
            prefix = len(self.subjects) - 1
            found["key"] = pc.utf8_slice_codeunits(batch.column("subject"), prefix)
        rows = pa.RecordBatch.from_arrays(list(found.values()), names=list(found))
        return rows if self.with_deleted else rows.filter(pc.equal(operations, _PUT))


def operations_of(headers: pa.Array[Any]) -> pa.Array[Any]:
    """PUT, DEL or PURGE, as the headers of each message state it."""
    pairs = headers.flatten()
    found = np.flatnonzero(np.asarray(pc.equal(pairs.field("key"), _OPERATION)))
    if not len(found):
        return pa.repeat(pa.scalar(_PUT), len(headers))
    rows, first = np.unique(rows_of_items(headers)[found], return_index=True)
    places = np.full(len(headers), -1, np.int64)
    places[rows] = found[first]
    stated = pairs.field("value").take(pa.array(places, mask=places < 0))
    return pc.if_else(pc.fill_null(pc.is_in(stated, pa.array(["DEL", "PURGE"])), False), stated, _PUT)
