"""Which news of access count: a metaserver that has not read a change yet tells of rights that
others have revoked.  Pure.
"""

from __future__ import annotations

from ...protocol.access.capability import AccessNews

OLDER_AFTER_MS = 10_000
"""Metaservers read changes within a second.  Where none has told of a version for this long, the
database was restored.
"""


class NewestNews:
    """The news with the highest version that was told lately; times are of the boot clock."""

    def __init__(self) -> None:
        self._cluster = ""
        self._version = 0
        self._told_ms = 0
        """When this version was told last."""

    def take(self, news: AccessNews, now_ms: int) -> bool:
        """Note news that came at `now_ms`; False if they are older than others, and are not to be
        judged by.
        """
        older = news.cluster == self._cluster and news.version < self._version
        if older and now_ms - self._told_ms < OLDER_AFTER_MS:
            return False
        self._cluster, self._version, self._told_ms = news.cluster, news.version, now_ms
        return True
