"""The replicas that this broker keeps: roles, replication, repair, direct appends, maintenance."""
