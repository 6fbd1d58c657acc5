"""The HTTP API (aiohttp) in front of a broker. Holds no state of its own."""

from natslog.http.app import HttpServer

__all__ = ["HttpServer"]
