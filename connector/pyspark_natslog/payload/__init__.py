"""Typed payloads: from the bytes of messages to columns.

The way in: `PayloadOptions.parse` reads what the source is told, a `Shaper` turns stored batches into Spark's columns.
Behind it one decoder a format (`json_rows`, `avro_rows`, `arrow_rows`, `string_rows`); JSON and Avro are decoded by
compiled kernels into a `tree` of columns as Arrow lays them out, no Python object a row.
"""

from pyspark_natslog.payload.options import PAYLOAD_OPTIONS, PayloadOptions

__all__ = ["PAYLOAD_OPTIONS", "PayloadOptions"]
