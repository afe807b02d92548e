"""The id that a producer sends under. Pure except for the log; the source of ids is passed in.

Brokers recognize a batch by (id, epoch, sequence), and refuse another batch with the same three: a
producer that is refused for this reason takes a new id.
"""

from __future__ import annotations

import logging

from ..rpc.environment import DrawBits

log = logging.getLogger("keylane.producer")


class Identity:
    """The id of an opened producer; it is replaced when a broker has met another producer with the
    same id.
    """

    def __init__(self, draw: DrawBits) -> None:
        self._draw = draw
        self.producer_id = draw(63) | 1

    def renew(self, clashed: int, partition_name: str) -> int:
        """
        Return the id that replaces `clashed`, which another producer also uses: the batches sent
        under it are not stored.

        Every executor that passes the same `clashed` gets the same new id.
        """
        log.warning(
            "%s: the producer id %x is used by another producer; continuing under a new one",
            partition_name,
            clashed,
        )
        if self.producer_id == clashed:
            self.producer_id = self._draw(63) | 1
        return self.producer_id
