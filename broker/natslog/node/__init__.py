"""A running broker: the asyncio loop that executes the decisions of the pure parts; files store the state.

`broker` builds, starts and stops everything; a `supervisor.Supervisor` owns each task. Below it, imports point one way:
`internal` (streams that natslog writes), `replicas` (the replicas of this broker), `cluster_node` (its membership),
`metadata` (the Raft group), `peers` (links), `writes` (from frames to commits), then `data_dir`, `life`, `clock`,
`history`. `operations`, `stream_operations` and `removing` carry out what operators request.
"""
