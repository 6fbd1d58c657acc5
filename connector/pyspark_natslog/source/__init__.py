"""Reading streams with Spark: options to offsets, offsets to tasks, tasks to Arrow batches.

`options` and `selection` state what is read, `positions` and `offsets` where, `admission` how much a trigger takes,
`splits` and `parallelism` which tasks there are, `loss` and `confirming` whether messages are missing. `reader` plans a
batch, `stream_reader` a streaming query, `range_reader` reads in a task, `watched_reader` adds lag, cursor and spans.
"""
