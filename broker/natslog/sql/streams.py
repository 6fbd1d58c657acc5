"""A DuckDB connection in which the streams of a cluster are tables.

    from natslog.sql import connect

    connect().sql("SELECT subject, count(*) FROM orders GROUP BY subject").show()

Every stream is fixed as it is when the connection is made: queries see the same messages each time.
"""

from __future__ import annotations

from contextlib import suppress

from natslog.client import NatslogClient
from natslog.errors import ConfigError, Forbidden
from natslog.sql.stream_table import Extent, Reads, StreamTable
from natslog.subjects import is_internal

try:
    import duckdb
except ImportError as error:
    raise ConfigError(f"SQL needs natslog[sql]: pip install 'natslog[sql]' ({error})") from error

MEMORY_LIMIT = "1GiB"
_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    # Nothing is downloaded unless the query says INSTALL.
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
}
_MACROS = (
    # Comparisons, unlike LIKE, are passed to the scan by every version of DuckDB.
    "CREATE TEMP MACRO under(subject, prefix) AS (subject >= prefix || '.' AND subject < prefix || '/')",
)


def connect(
    client: NatslogClient | None = None, *, memory_limit: str = MEMORY_LIMIT, temp_directory: str | None = None
) -> duckdb.DuckDBPyConnection:
    """A connection to an empty database in memory, in which each stream that may be read is a view by its name. A scan
    requests only the columns that the query needs, and leaves out what its conditions on offset, timestamp and subject
    exclude.

    Connect again for later messages, and for streams that are created later.

    Args:
        client: default: one with the servers and credentials of the environment.
        memory_limit: of DuckDB, which stores what exceeds it in `temp_directory` (default: DuckDB's own, `.tmp`).

    Raises:
        ConfigError: the extra `sql` is not installed, or a limit is wrong. BrokerUnavailable, Unauthorized. Errors of
        brokers during a query are errors of DuckDB with the same text.
    """
    return open_streams(
        Reads(client or NatslogClient()), memory_limit=memory_limit, temp_directory=temp_directory, uses_variables=True
    )


def open_streams(
    reads: Reads, *, memory_limit: str, temp_directory: str | None, uses_variables: bool
) -> duckdb.DuckDBPyConnection:
    """The same for scans that can be stopped, and whose errors are wanted.

    Args:
        uses_variables: a name that is no table may be that of a Python variable.
    """
    settings = _SETTINGS | {"memory_limit": memory_limit, "python_enable_replacements": uses_variables}
    if temp_directory is not None:
        settings["temp_directory"] = temp_directory
    try:
        connection = duckdb.connect(config=settings)
    except duckdb.Error as error:
        raise ConfigError(f"DuckDB refuses its settings: {error}") from error
    connection.execute("SET TimeZone = 'UTC'")
    for macro in _MACROS:
        connection.execute(macro)
    for extent in _extents(reads.client):
        connection.register(extent.name, StreamTable(reads, extent))
    return connection


def _extents(client: NatslogClient) -> list[Extent]:
    """All streams that may be read, each up to its present high watermark. SQL does not distinguish names by case: of
    several that differ only by case, the first one is a table.
    """
    listed = {stream["name"]: stream for stream in client.streams(internal=True)}
    positions = client.positions()
    for name in filter(is_internal, listed):
        with suppress(Forbidden):
            positions += client.positions(names=[name])
    found: dict[str, Extent] = {}
    for position in sorted(positions, key=lambda one: str(one["name"])):
        name = position["name"]
        if name in listed and name.lower() not in found:
            stated = position if "high_watermark" in position else client.position(name)
            subjects = listed[name].get("subjects") or [listed[name]["subject"]]
            start, end = stated["log_start_offset"], stated["high_watermark"]
            found[name.lower()] = Extent(name, stated["id"], subjects, start, end)
    return list(found.values())
