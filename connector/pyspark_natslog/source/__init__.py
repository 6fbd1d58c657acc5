"""Reading streams with Spark: options to offsets, offsets to tasks, tasks to Arrow batches."""
