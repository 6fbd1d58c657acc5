"""Streams copied into tables of Delta Lake or Apache Iceberg, by a plain process: `natslog table run`.

    stream ──▶ copying ──▶ rows (json_columns) ──▶ delta | iceberg      one commit: rows and offset
                              └── dead letters ──▶ a table of their own

`copying` reads the stream and decides when to commit; `rows` makes table rows of messages; a `Table` (`delta`,
`iceberg`) stores them together with the offset behind them, so that whatever is killed, each message is in the table
once. Nothing here imports Spark.
"""
