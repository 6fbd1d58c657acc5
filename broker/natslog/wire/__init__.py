"""NATS on the wire: the connection (nats-py's) and the columnar parsing of what it receives."""
