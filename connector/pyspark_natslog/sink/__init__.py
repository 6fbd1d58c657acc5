"""Writing rows with Spark: published to NATS (`writer`), or appended to a stream over HTTP (`http_writer`).

`options` and `http_options` check what is given before a job starts; `dead_letters` makes messages of rows that cannot
be sent.
"""
