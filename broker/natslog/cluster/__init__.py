"""The pure part of agreement: the state of the cluster and how a command changes it. No I/O, clock or randomness.

`metadata` is the state machine that all brokers apply (`commands`, `stream_changes`, `cursors`, `security_changes`),
`controller` what its leader decides (leaders, moves), `placement` and `rebalancing` where replicas belong. `replica` is
the state machine of one replica (`roles`: leader and follower, with the high watermark and the in-sync replicas),
`stream_time` the clock of streams, `activity` the events that follow from commands, `features` the feature levels.
"""
