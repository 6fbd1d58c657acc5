"""The command `natslog`, also as `python -m natslog`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs it. ^C ends it with exit code 130, also while its modules are loaded."""
    try:
        from natslog.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
