"""Typed payloads: from the bytes of messages to columns.

`PayloadOptions.parse` reads the options, and a `Shaper` turns stored batches into Spark's columns. There is one decoder
per format (`json_rows`, `avro_rows`, `arrow_rows`, `string_rows`). Compiled kernels decode JSON and Avro into a `tree`
of columns in the layout of Arrow, without a Python object per row.
"""

from pyspark_natslog.payload.options import PAYLOAD_OPTIONS, PayloadOptions

__all__ = ["PAYLOAD_OPTIONS", "PayloadOptions"]
