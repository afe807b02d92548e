"""Decides which news of access count: a metaserver that has not read a change yet still reports
rights that were revoked. Pure.
"""

from __future__ import annotations

from ...protocol.access.capability import AccessNews

OLDER_AFTER_MS = 10_000
"""The time in milliseconds after which older news count. Metaservers read changes within a second;
if none has reported a version for this long, the database was restored.
"""


class NewestNews:
    """The news with the highest version that was reported lately. Times are those of the boot
    clock.
    """

    def __init__(self) -> None:
        self._cluster = ""
        self._version = 0
        self._told_ms = 0
        """The time at which this version was last reported, in milliseconds."""

    def take(self, news: AccessNews, now_ms: int) -> bool:
        """Note news that arrived at `now_ms`. Return False if they are older than others, and must
        not be used.
        """
        older = news.cluster == self._cluster and news.version < self._version
        if older and now_ms - self._told_ms < OLDER_AFTER_MS:
            return False
        self._cluster = news.cluster
        self._version = news.version
        self._told_ms = now_ms
        return True
