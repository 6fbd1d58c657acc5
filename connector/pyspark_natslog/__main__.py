"""`python -m pyspark_natslog jar` prints the path of the columnar reader for Spark: see docs/SPARK.md."""

from __future__ import annotations

import argparse
import sys

from natslog.errors import NatslogError
from pyspark_natslog.jar import jar_path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pyspark_natslog", description="The Spark connector of natslog.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("jar", help="print the path of the columnar reader, for spark.jars or --jars")
    parser.parse_args()
    try:
        print(jar_path())
    except NatslogError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
