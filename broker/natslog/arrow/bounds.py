"""Limits of what is stored, which also hold for what a client accepts. Imports nothing, so that clients start fast."""

from __future__ import annotations

MOST_ROWS_BYTES = 128 * 1024 * 1024
"""Of the rows of one batch, uncompressed."""
