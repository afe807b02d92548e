"""What an ack promises, as grades that can be compared."""

from __future__ import annotations

import enum


class Durability(enum.IntEnum):
    """What a send's ack promises of a server alone on its machine; a greater grade keeps all that a
    smaller one does.
    """

    PAGE_CACHE = 1
    """Written, and lost with the power of the machine until the system or the server syncs."""
    FSYNCED = 2
    """Synced to the disk before the ack."""

    @property
    def shown(self) -> str:
        """For tables."""
        return "fsynced" if self is Durability.FSYNCED else "page cache"
