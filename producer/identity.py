"""The producer id under which batches are sent. Pure except for logging; the source of ids is
passed in.

Brokers identify a batch by (id, epoch, sequence), and refuse a different batch with the same three
values. A producer whose batch is refused for this reason takes a new id.
"""

from __future__ import annotations

import logging

from ..rpc.environment import DrawBits

log = logging.getLogger("keylane.producer")


class Identity:
    """The id of an open producer, which is replaced when a broker finds another producer with the
    same id.
    """

    def __init__(self, draw: DrawBits) -> None:
        self._draw = draw
        self.producer_id = draw(63) | 1

    def renew(self, clashing_id: int, partition_name: str) -> int:
        """
        Return the id that replaces `clashing_id`, which another producer also uses. The refused
        batch was not stored.

        All executors that pass the same `clashing_id` get the same new id.
        """
        log.warning(
            "%s: the producer id %x is used by another producer; continuing under a new one",
            partition_name,
            clashing_id,
        )
        if self.producer_id == clashing_id:
            self.producer_id = self._draw(63) | 1
        return self.producer_id
