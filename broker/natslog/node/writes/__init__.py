"""From received messages to commits.

`stream_ingest` is the path of one stream from frames to acks, in turns of a writer. `admission`, `stream_room` and
`header_checks` refuse messages, `ingest_memory` bounds what waits, `commit_timing` decides when several replicas sync,
`dedupe_rebuild` fills the deduplication window from the log, `staging` keeps uploads until they are committed.
"""
