"""Rejects outdated access news: a metaserver that has not read a change yet still reports revoked
rights. Pure.
"""

from __future__ import annotations

from ...protocol.access.capability import AccessNews

OLDER_AFTER_MS = 10_000
"""How long outdated news is rejected, in milliseconds. Metaservers read changes within a second, so
if none has reported the newest version for this long, the database was restored.
"""


class NewestNews:
    """Tracks the newest version of the access news. Times are in milliseconds since boot."""

    def __init__(self) -> None:
        self._cluster = ""
        self._version = 0
        self._reported_ms = 0
        """When this version was last reported, in milliseconds."""

    def accept(self, news: AccessNews, now_ms: int) -> bool:
        """Record news that arrived at `now_ms`. Return False if it is outdated and must be
        ignored.
        """
        is_older = news.cluster == self._cluster and news.version < self._version
        if is_older and now_ms - self._reported_ms < OLDER_AFTER_MS:
            return False
        self._cluster = news.cluster
        self._version = news.version
        self._reported_ms = now_ms
        return True
