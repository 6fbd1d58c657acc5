"""NATS to batches: columns from frames, deduplication, acks. No I/O: the node reads and writes."""
