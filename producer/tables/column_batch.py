"""A batch that is created from columns, whose body therefore exists before it is queued. Pure
except for its future.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...protocol.batch import encode_body, split_columns
from ...protocol.record import Compression
from ..outgoing_batch import OutgoingBatch


class ColumnBatch(OutgoingBatch):
    """A closed batch whose lists of keys and values are created only if a failure makes them
    necessary.
    """

    __slots__ = ("_body",)

    def __init__(
        self, loop: asyncio.AbstractEventLoop, body: bytes, count: int, sent_at_ns: int
    ) -> None:
        """Create a batch from `body`, the result of `join_columns` for `count` messages with the
        same send time.
        """
        super().__init__(loop)
        self._body = body
        self.count = count
        self.full_size = len(body)
        self._time_runs = [(0, sent_at_ns)]
        del self.keys, self.values

    # Not in OutgoingBatch, because it would slow down all attributes of the class, and `send` reads
    # six of them for each message.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> list[bytes]:
            """Create the lists of keys and values from the body, and return one of them."""
            if name not in ("keys", "values"):
                raise AttributeError(name)
            self.keys, self.values = split_columns(self._body, self.count)
            return self.keys if name == "keys" else self.values

    def __len__(self) -> int:
        return self.count

    def iter_unsettled(self) -> Iterator[tuple[bytes, int, int]]:
        """Yield the key, the size in bytes and the send time of each unsettled message, without
        creating the lists.
        """
        return self._iter_unsettled(*split_columns(self._body, self.count))

    def pack(
        self, *, sequence: int, compression: Compression = Compression.NONE, **fields: int
    ) -> bytes | bytearray:
        """Encode the batch; see `OutgoingBatch.pack`."""
        if self.data is None:
            self.sequence = sequence
            sent_at_ns = self.first_sent_at_ns
            self.data = encode_body(
                self._body,
                count=self.count,
                compression=compression,
                first_sent_at_ns=sent_at_ns,
                last_sent_at_ns=sent_at_ns,
                sequence=sequence,
                **fields,
            )
        return self.data
