"""The `natslog` command: `main` puts the groups of commands together, one module each.

Modules load what they need when a command runs, so that `natslog --help` and commands without rows start without
pyarrow and numpy. `common` (connection, errors), `output` (tables, JSON) and `broker_settings` are shared.
"""

from natslog.cli.main import main

__all__ = ["main"]
