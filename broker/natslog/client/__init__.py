"""The clients of brokers and of NATS: the blocking HTTP client and the publisher.

`client` (reads), `streams`, `cursors` and `appending` (its other calls), `consuming` (reads from a cursor on, and moves
it: `consume_options`, `checkpoints`), `reading_ahead`, `asking` (retries over all brokers), `epochs` (which answer
about a stream's bounds is the newest), `confirming` (whether messages are lost), `publisher` (columnar publishing to
NATS; imported by itself, because it loads the compiled kernels), `spark_checkpoint` (positions of Spark queries).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from natslog.client.asking import ClientOptions, leader_epochs, parse_servers
from natslog.client.client import FETCH_BYTES, NatslogClient, SplitRange

if TYPE_CHECKING:
    from natslog.client.answers import Fetched
    from natslog.client.consuming import ConsumedBatch, Consumer

__all__ = [
    "FETCH_BYTES",
    "ClientOptions",
    "ConsumedBatch",
    "Consumer",
    "Fetched",
    "NatslogClient",
    "SplitRange",
    "leader_epochs",
    "parse_servers",
]

_OF_ROWS = {"ConsumedBatch": "consuming", "Consumer": "consuming", "Fetched": "answers"}


def __getattr__(name: str) -> Any:
    """What needs pyarrow is imported at its first use."""
    if name in _OF_ROWS:
        return getattr(import_module(f"natslog.client.{_OF_ROWS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
