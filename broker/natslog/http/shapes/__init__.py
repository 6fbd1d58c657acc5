"""What the API takes and answers, as types: bodies of requests and responses in JSON, and parameters.

`/openapi.json` derives its schemas from them, and requests are read by them (`decoding`). Responses are encoded from
them, so a field that is not declared here cannot be sent. A field that is `UNSET` is left out. Counts that are None are
unknown to the reader: clients then use offsets.

Settings of streams are checked by `natslog.model`, which names the remedy.
"""
