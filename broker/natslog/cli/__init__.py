"""The `natslog` command."""

from natslog.cli.main import main

__all__ = ["main"]
