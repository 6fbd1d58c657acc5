"""The pure part of agreement: the state of the cluster and how a command changes it. No I/O, clock or randomness."""
