"""Streams that natslog itself writes: their names begin with `__`.

`keeper` creates them and adapts their replicas, `appending` appends to them, `activity` reports the events of a
cluster, `cursors` and `cursor_leader` keep the table of cursors.
"""
