"""Writing rows with Spark: published to NATS, or appended to a stream over HTTP."""
