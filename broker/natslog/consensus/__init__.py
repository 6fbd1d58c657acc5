"""Raft without I/O: messages and ticks in, what to save, send and apply out."""
