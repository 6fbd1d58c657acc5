"""Consumers of the JetStream API.

`config`: configurations, and how they are checked. `machine`: what a consumer does, without I/O and without a clock.
`deliveries`, `pending`, `pulls`: parts of it. `state`: how that is stored. `frames`: NATS protocol of deliveries, and
of acks. `reading`: messages for deliveries. `leading`: all consumers of a stream, at its leader. `retention`: messages
that no consumer needs any more. `calls`: the requests of the API about consumers.
"""
