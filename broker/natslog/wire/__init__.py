"""The NATS protocol: the connection (of nats-py) and the columnar parsing of received data."""
