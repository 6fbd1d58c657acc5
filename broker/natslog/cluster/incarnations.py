"""Incarnations: the names of the lives of brokers' data folders, and which life may follow which.

    directory.life.nonce     `nonce` is random and new at each start
    directory.life           as it was registered at feature level 1; valid until the next start of that broker

Theory of operation. Every start on a folder is a separate life. A folder lists its lives, each before that life is
registered, so the registered life is in the list of its folder. It is not in the list of a copy that was made before
that life: a folder and its copy differ from the first start on, by their nonces. A folder whose list lacks the
registered life is an older copy. It lacks later acknowledged messages and votes of its broker.
"""

from __future__ import annotations

from collections.abc import Sequence

from natslog.cluster.commands import BrokerRecord
from natslog.errors import InvalidRequest, OutdatedFolder


def is_life(registered: str, started: str) -> bool:
    """Whether `started`, which has a nonce, is the life that is registered, with its nonce or without it."""
    return started == registered or started.rpartition(".")[0] == registered


def is_former_life(asked: str, known: str) -> bool:
    """Whether `asked` is an earlier life of the folder that `known` is a life of."""
    one, other = asked.split("."), known.split(".")
    if min(len(one), len(other)) < 2 or one[0] != other[0] or not (one[1] + other[1]).isdecimal():
        return False
    return int(one[1]) < int(other[1])


def check_follows(known: BrokerRecord | None, broker: BrokerRecord, lives: Sequence[str]) -> None:
    """Whether this life may be registered after the one that is.

    Args:
        lives: those that the folder had.

    Raises:
        OutdatedFolder: the folder is an older copy, or it was replaced. InvalidRequest: it has no nonce.
    """
    if not broker.nonce:
        raise InvalidRequest(f"register {broker.incarnation} with a nonce")
    if known is None or broker.incarnation == known.incarnation:
        return
    if broker.directory in known.former_directories:
        raise outdated_folder(known, broker.url)
    if broker.directory == known.directory and (known.incarnation not in lives or broker.life <= known.life):
        raise outdated_folder(known, broker.url)


def outdated_folder(known: BrokerRecord, url: str) -> OutdatedFolder:
    """The error that refuses a folder without the registered life."""
    return OutdatedFolder(
        f"the data folder of broker {known.id} at {url} is an older copy: it does not contain life {known.life} of "
        f"that broker ({known.incarnation}), which is registered. Messages that the broker acknowledged after the "
        f"copy was made, and its votes, are missing in it. Start broker {known.id} with its newest data folder, or "
        f"replace it: natslog cluster remove {known.id} --force, give it an empty data folder, natslog cluster add "
        f"{url}",
        broker=known.id,
        registered=known.incarnation,
    )
