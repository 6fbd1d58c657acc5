"""The message schema as Arrow has it, on disk and on the wire: self-proving batches, rows on their way to a log."""
