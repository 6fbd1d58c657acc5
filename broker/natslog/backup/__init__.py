"""Exports of streams to files, and their import into another cluster. See docs/OPERATIONS.md, "Back up"."""
