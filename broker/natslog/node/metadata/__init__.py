"""The metadata group on this broker.

`group` runs Raft (proposals, reads, snapshots) with its store (`raft_store`, `raft_wal`); `session` states whether a
majority confirms the metadata; `leader` has the tasks of the metadata leader; `admission` and `registration` admit
brokers; `disk_pulse` notices a disk that hangs; `upgrade` finalizes; `recover` is the last resort.
"""
