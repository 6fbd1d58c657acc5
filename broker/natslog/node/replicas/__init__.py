"""The replicas of this broker: roles, replication, repair, direct appends, maintenance."""
