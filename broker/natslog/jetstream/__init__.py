"""The JetStream API, so that JetStream clients use natslog streams without changes. See docs/JETSTREAM.md.

`api` subscribes to the subjects and decides which broker answers; `requests` and `stream_config` decode, `streams`,
`stored_messages`, `direct` and `stream_state` answer; `errors` has the codes and texts of the server. `consumers` is a
package of its own.
"""
