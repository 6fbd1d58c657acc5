"""From received messages to commits: ingest of one stream, its memory, its deduplication window, staged uploads."""
