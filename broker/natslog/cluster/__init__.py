"""Agreement, pure: what the cluster knows and how a command changes it. No I/O, no clock, no chance."""
