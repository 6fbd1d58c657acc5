"""Streams as tables of DuckDB: `connect` (a connection with all streams of a cluster), and the rows that a query needs.

`streams` (the connection, and what all tables share), `stream_table` (one stream as a dataset that DuckDB scans),
`pushed` (what the condition of a scan states about offsets, times and subjects).
"""

from natslog.sql.stream_table import Reads
from natslog.sql.streams import connect, open_streams

__all__ = ["Reads", "connect", "open_streams"]
