"""A newcomer's first minutes: README's commands, copied from README, in a fresh checkout with nothing activated.

Each command must succeed and print what README says (the convention is in `tests.readme`).
"""

from __future__ import annotations

import sysconfig
import venv
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from natslog.nats_server import find_binary
from tests.newcomer import Terminal, fresh_checkout, left_running, own_network
from tests.pages import plays
from tests.readme import Block

_SECONDS = 1500  # PySpark alone is 0.4 GB to download
_NATS_PORT, _HTTP_PORT = 4222, 9292  # of `natslog dev`, as README uses it


@pytest.mark.extended
@pytest.mark.timeout(_SECONDS)
@plays("README.md")
def test_readme_gets_a_newcomer_through_in_a_fresh_checkout_with_nothing_activated(
    tmp_path: Path, played: list[Block]
) -> None:
    checkout = fresh_checkout(tmp_path / "natslog")
    install, *others = played
    _lend_packages(checkout)
    with Terminal(checkout, []) as terminal:
        assert terminal.run("command -v natslog")[0] != 0, "natslog is activated already"
        for command in install.commands:  # in the network of this machine: packages are downloaded
            terminal.play(command)
    _play(others, checkout)


def _lend_packages(checkout: Path) -> None:
    """Packages that this environment has are not installed once more: `make install` finds them, and adds natslog."""
    venv.create(checkout / ".venv", with_pip=True, symlinks=True)
    (own,) = (checkout / ".venv").glob("lib/python*/site-packages")
    (own / "lent.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (checkout / ".venv/bin/nats-server").symlink_to(find_binary())


def _play(found: Sequence[Block], checkout: Path) -> None:
    with own_network(_NATS_PORT, _HTTP_PORT) as prefix, ExitStack() as running, Terminal(checkout, prefix) as terminal:
        for block in found:
            if block.file_name is not None:
                (checkout / block.file_name).write_text(block.text)
            elif block.is_left_running:
                (command,) = block.commands
                running.enter_context(left_running(command, checkout, prefix))
            else:
                for command in block.commands:
                    terminal.play(command)
