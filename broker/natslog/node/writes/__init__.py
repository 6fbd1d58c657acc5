"""From received messages to acks.

`stream_ingest` is the path of one stream from frames to acks, through its parts in this order: `screening` (and
`refusals`, with `header_checks`), `writer` (with `pace`), `commits` (with `admission`, `stream_room`,
`last_of_subjects`, and `dedupe_rebuild`, which fills the deduplication window from the log), `waiting_acks`.
`ingest_memory` bounds what waits; `staging` keeps uploads until they are committed.
"""
