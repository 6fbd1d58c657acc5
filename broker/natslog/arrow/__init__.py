"""The message schema as Arrow has it, on disk and on the wire.

`schema` (columns), `ipc` and `batch_line` (batches that validate themselves), `row_buffers` (rows before they are
appended to a log), `restamping` (batches of another log), `projection` (some columns of stored batches),
`messages_json`, `searching`, and `json_blocks` (JSON by Arrow's parser, for tables). No files and no
sockets.
"""
