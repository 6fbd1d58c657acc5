"""Consumers of the JetStream API.

`config`: configurations, and how they are checked. `machine`: what a consumer does, without I/O and without a clock.
`deliveries`, `pending`, `pulls`: parts of it. `nak`: delays of negative acks. `state`: how that is stored. `reading`:
messages for deliveries. `leading`: all consumers of a stream, at its leader; `served`: one of them. `serving`: those of
all streams that a broker leads. `retention`: messages that no consumer needs any more. `calls`: the requests of the API
about consumers. `positions`: lag and numbers; `importing`: consumers of an imported stream; `advisories`: what is
published of them.
"""
