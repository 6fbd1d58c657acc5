"""Streams that natslog itself writes: their names begin with `__`. `keeper` creates them, `appending` appends to them,
`activity` reports the events of a cluster.
"""
