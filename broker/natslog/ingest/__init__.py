"""NATS to batches: columns from frames, deduplication, acks. No I/O: the node reads and writes.

`batches` gathers rows (`columns`, `header_columns`, `envelopes`), `unwanted` and `message_sizes` refuse, `conditions`
reads what a message expects, `dedupe` recognises message ids, `ack_rules` decides which messages are acked and where,
`acks` makes the acks of a commit. `staged_rows` checks uploads.
"""
