"""Streams of JetStream, copied into a cluster of natslog. See docs/JETSTREAM.md, "Moving from JetStream".

`source`: the API of the JetStream server. `settings`: of the natslog stream. `receiving`: messages, as columns and then
as batches of a log. `importing`: a stream from the first request to the switch-over.
"""
