"""The pure part of agreement: the state of the cluster and how a command changes it. No I/O, clock or randomness.

`metadata` is the state machine that all brokers apply (`commands`, `stream_changes`, `cursors`, `security_changes`),
`controller` what its leader decides (leaders, moves), `placement` and `rebalancing` where replicas belong. `replica` is
the state machine of one replica (`leading` and `following`, by the rules of `roles` and `tracks`: the high watermark
and the in-sync replicas), `damage` and `removals` what is done about damaged and removed messages, `stream_time` the
clock of streams, `activity` the events that follow from commands, `features` the feature levels.
"""
