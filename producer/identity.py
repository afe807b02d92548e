"""The id that a producer sends under.  Pure; the source of ids is passed in.

Brokers recognize a batch by (id, epoch, sequence), and refuse another batch with the same three: a producer that is
refused so takes a new id.
"""

from __future__ import annotations

from ..rpc.identity import DrawBits


class Identity:
    """The id of an opened producer; replaced when a broker has met another producer with the same id."""

    def __init__(self, draw: DrawBits) -> None:
        self._draw = draw
        self.producer_id = draw(63) | 1

    def renew(self, clashed: int) -> int:
        """The id that replaces `clashed`; every executor that passes the same `clashed` gets the same new id."""
        if self.producer_id == clashed:
            self.producer_id = self._draw(63) | 1
        return self.producer_id
