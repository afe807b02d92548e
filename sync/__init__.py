"""Blocking clients for programs without an event loop, such as scripts and notebooks.

from keylane.sync import Consumer, Producer

Each client runs in a thread of its own. Records that are logged there, for example in an outage,
are handled a moment later on a thread named `keylane logs`, so that a handler of `logging` may send
them.
"""

from typing import TYPE_CHECKING

from .arrow_batch import TakenBatch
from .consumer import SyncConsumer, TakenMessage
from .producer import ScheduledMessage, SentMessage, SyncProducer

Consumer = SyncConsumer
Producer = SyncProducer

_ASYNC_ONLY = frozenset({"Admin", "QueueReader", "Reader"})


if not TYPE_CHECKING:  # a type checker must report names that do not exist

    def __getattr__(name: str) -> object:
        if name in _ASYNC_ONLY:  # `from keylane.sync import` would hide an AttributeError's text
            raise ImportError(
                f"keylane.sync has no {name}: use keylane.{name} in an async def, and call that "
                "with asyncio.run, from any thread; in a notebook await it (docs/CONSUMING.md, "
                "Without an event loop)",
                name=__name__,
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Consumer", "Producer", "ScheduledMessage", "SentMessage", "TakenBatch", "TakenMessage"]
