"""Under which id a producer sends.  Pure; where ids come from is passed in.

Brokers know a batch again by (id, epoch, sequence), and refuse another one in its place: whoever meets that goes on
under a new id.
"""

from __future__ import annotations

from ..rpc.identity import DrawBits


class Identity:
    """The id of one opening of a producer; another one, once a broker has met the same id elsewhere."""

    def __init__(self, draw: DrawBits) -> None:
        self._draw = draw
        self.producer_id = draw(63) | 1

    def renew(self, clashed: int) -> int:
        """The id to use from now on instead of `clashed`; the same for all who come with that."""
        if self.producer_id == clashed:
            self.producer_id = self._draw(63) | 1
        return self.producer_id
