"""A running broker: the asyncio loop that executes the decisions of the pure parts; files store the state."""
