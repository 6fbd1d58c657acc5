"""The metadata group on this broker: Raft with a store, what falls to its leader, who is admitted, the last resort."""
