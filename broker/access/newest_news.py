"""Rejects outdated access news: a metaserver that has not read a change yet still reports revoked
rights. Pure.
"""

from __future__ import annotations

from ...protocol.access.capability import AccessNews

OLDER_AFTER_MS = 10_000
"""The time, in milliseconds, after which older news are accepted. Metaservers read changes within a
second; if none has reported the newest version for this long, the database was restored.
"""


class NewestNews:
    """Tracks the newest version of access news, using times of the boot clock."""

    def __init__(self) -> None:
        self._cluster = ""
        self._version = 0
        self._reported_ms = 0
        """When this version was last reported, in milliseconds."""

    def accept(self, news: AccessNews, now_ms: int) -> bool:
        """Record news that arrived at `now_ms`. Return False if they are outdated and must be
        ignored.
        """
        is_older = news.cluster == self._cluster and news.version < self._version
        if is_older and now_ms - self._reported_ms < OLDER_AFTER_MS:
            return False
        self._cluster = news.cluster
        self._version = news.version
        self._reported_ms = now_ms
        return True
