"""Clients for programs without an event loop, as scripts and notebooks: `from keylane.sync import
Consumer, Producer`.
"""

from typing import TYPE_CHECKING

from .arrow_batch import TakenBatch
from .consumer import SyncConsumer, TakenMessage
from .producer import ScheduledMessage, SentMessage, SyncProducer

Consumer = SyncConsumer
Producer = SyncProducer

_AWAITED = frozenset({"Admin", "QueueReader", "Reader"})


if not TYPE_CHECKING:  # for a type checker a name that is not there is an error

    def __getattr__(name: str) -> object:
        if name in _AWAITED:  # an AttributeError would lose its text in `from keylane.sync import`
            raise ImportError(
                f"keylane.sync has no {name}: use keylane.{name} in an async def, and call that "
                f"with asyncio.run, from any "
                "thread; in a notebook await it (docs/CONSUMING.md, Without an event loop)",
                name=__name__,
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Consumer", "Producer", "ScheduledMessage", "SentMessage", "TakenBatch", "TakenMessage"]
