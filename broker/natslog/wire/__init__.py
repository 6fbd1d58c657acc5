"""The NATS protocol: the connection (of nats-py) and the columnar parsing of received data.

`link` keeps connected over several `lanes`; `transport` lets bytes land in the buffer of the parser; `frames` finds
messages. `native` calls the kernels (`kernels*`, compiled when natslog is built; `library` loads them). `leaf*` is the
leafnode connection for consumers, `outgoing*` what publishers send, `envelope*` many rows as one message, `message_ids`
and `row_hashes` what recognises repetitions.
"""
