"""A running broker: the asyncio loop that acts on what the pure parts decide and the files remember."""
