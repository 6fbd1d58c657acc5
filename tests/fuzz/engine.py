"""One target under atheris, in a process of its own: `python -m tests.fuzz.engine MODULE TARGET [arguments]`."""

from __future__ import annotations

import functools
import importlib
import logging
import sys

MOST_RSS_MIB = 3072
WITHIN_S = 120
"""Of the clock, after which libFuzzer ends the process: long, because other programs may use the machine. The limit of
CPU time is `target.MOST_S`.
"""
_MODELS = ("tests.unit.connector.payload.test_json", "fastavro._read_py", "tests.fuzz.models")


def main(module: str, name: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["natslog", "pyspark_natslog", *_MODELS]):
        importlib.import_module(module)
    from tests.compared_kernels import compare_kernels
    from tests.fuzz.target import TARGETS

    compare_kernels()

    chosen = TARGETS[name]
    logging.disable(logging.CRITICAL)
    for seed in chosen.seeds():  # kernels are compiled and files are written before time is measured
        chosen.check(seed)
    atheris.Setup([sys.argv[0], *arguments], functools.partial(_run, chosen.run), enable_python_coverage=True)
    atheris.Fuzz()


def _run(check: functools.partial[None], data: bytes) -> None:
    check(data)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
