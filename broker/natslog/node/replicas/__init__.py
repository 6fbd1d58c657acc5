"""The replicas of this broker: roles, replication, repair, direct appends, maintenance.

`hosting` has one `stream.HostedStream` for each record of the metadata. Behind it, `replica_driver` passes inputs to
`cluster.replica`, and `step_executor` executes its steps; `replicated_log` is a log as brokers copy it. `services` is
what they share, and the parts of the broker that they call; `jetstream` is the API of `natslog.jetstream` as they use
it. `fetcher` copies from leaders, `fetch_sessions` serves followers, `companion` keeps records that are not messages,
`direct_append` commits uploads, `upkeep` seals and applies retention, `scrubbing` and `range_repair` read back and
repair, `positions`, `lags` and `watching` answer readers.
"""
