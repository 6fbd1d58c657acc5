"""The variables of OpenTelemetry that decide whether and where spans are exported; the SDK reads all others itself.

Source: OpenTelemetry, "Environment Variable Specification" and "OpenTelemetry Protocol Exporter".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DEFAULT_ENDPOINTS = {"http/protobuf": "http://localhost:4318/v1/traces", "grpc": "http://localhost:4317"}
_USER = re.compile(r"//\S*@")
_QUERY = re.compile(r"([?#])[^\s,;)'\"]+")


def requested_by(variables: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Names of the exporters that the variables request: none without `OTEL_TRACES_EXPORTER` or an endpoint."""
    if variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    stated = variables.get("OTEL_TRACES_EXPORTER", "").strip()
    if not stated:
        return ("otlp",) if _first(variables, _ENDPOINTS) else ()
    names = [name.strip() for name in stated.split(",")]
    return tuple(dict.fromkeys(name for name in names if name not in ("", "none")))


def protocol(variables: Mapping[str, str] = os.environ) -> str:
    """Of the exporter `otlp`."""
    return _first(variables, _PROTOCOLS) or "http/protobuf"


def endpoint(variables: Mapping[str, str] = os.environ) -> str:
    """Where the exporter `otlp` sends spans to."""
    of_traces, of_all = (variables.get(name, "").strip() for name in _ENDPOINTS)
    if of_traces or not of_all:
        return of_traces or _DEFAULT_ENDPOINTS.get(protocol(variables), "")
    return of_all if protocol(variables) == "grpc" else f"{of_all.rstrip('/')}/v1/traces"


def _first(variables: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((found for name in names if (found := variables.get(name, "").strip())), "")


def shown_text(text: str) -> str:
    """A URL, or a text with URLs, without users, passwords, queries and fragments, which may be secrets."""
    return _QUERY.sub(r"\1…", _USER.sub("//…@", text))


def header_variables(variables: Mapping[str, str] = os.environ) -> list[str]:
    """Names of those that are set, of the headers that the exporter `otlp` sends."""
    return [name for name in _HEADERS if variables.get(name, "").strip()]
