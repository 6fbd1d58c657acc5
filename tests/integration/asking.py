"""Raw questions to a broker's HTTP API, without the client's help."""

from __future__ import annotations

import json
from typing import Any

import urllib3

from tests.harness import BrokerProcess

_http = urllib3.PoolManager()


def ask(broker: BrokerProcess, method: str, path: str, body: Any = None, **headers: str) -> urllib3.BaseHTTPResponse:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return _http.request(method, broker.url + path, body=data, headers=names, retries=False, redirect=False)


def error(answer: urllib3.BaseHTTPResponse) -> dict[str, Any]:
    return dict(answer.json()["error"])
