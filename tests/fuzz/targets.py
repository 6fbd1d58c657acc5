"""All targets."""

from tests.fuzz import (
    of_answers,
    of_arrow,
    of_files,
    of_http,
    of_imports,
    of_payloads,
    of_peers,
    of_spark,
    of_texts,
    of_wire,
)
from tests.fuzz.target import TARGETS, Target

__all__ = ["TARGETS", "Target"]

_MODULES = (of_answers, of_arrow, of_files, of_http, of_imports, of_payloads, of_peers, of_spark, of_texts, of_wire)
