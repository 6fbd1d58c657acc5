"""The HTTP API (aiohttp) in front of a broker. Holds no state of its own.

A request passes `tls_port` and `connections` (bounds), `gate` (credentials, access rules, quotas), then the function of
its call, one module for each subject: `streams`, `messages`, `appends`, `cursors`, `cluster`, `security`, …. `context`
checks which broker may answer, `forwarding` passes a request on. Each call is a row of a table, from which
`/openapi.json` is made. `overview` and `findings` state what is wrong, `metrics` is for Prometheus, `console` serves
files.
"""

from natslog.http.app import HttpServer

__all__ = ["HttpServer"]
