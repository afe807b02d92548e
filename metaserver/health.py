"""Reports whether a metaserver is ready for clients and, if not, why. It replies within a second,
even if the database does not respond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import to_builtins
from msgspec.structs import replace

from ..protocol.control import Health
from .cached_read import CachedRead
from .cluster.brokers import broker_views, refused_views
from .cluster.lost_database import database_lost_error
from .membership import ClusterMember, cluster_view
from .sql.database import Database


class HealthyDatabase(Database, Protocol):
    """A database that reports its health and its new connections."""

    @property
    def name(self) -> str:
        """The database dialect: "sqlite" or "postgresql"."""
        ...

    async def problem(self) -> str:
        """Return the reason why the database cannot be written to at the moment, or ""."""
        ...

    def describe_silence(self) -> str:
        """Return a text that says for how long the database has not responded; "" if it
        responds.
        """
        ...

    def on_new_connection(self, callback: Callable[[], None]) -> None:
        """Register a callback for new connections. Each of them may lead to another server, such as
        a replica that lacks recent commits.
        """
        ...


class MetaserverHealth:
    """The health of one metaserver."""

    def __init__(
        self,
        database: HealthyDatabase,
        member: ClusterMember | None,
        refused_copies: Callable[[str], dict[str, str]],
    ) -> None:
        self._refused_copies = refused_copies
        self._database = database
        self._member = member
        self._cache = CachedRead(self._read)

    async def read_health(self) -> Health:
        """Return the current health, or the cached one if the database does not respond in time;
        `details.age_ms` is the age of the result.
        """
        result = await self._cache.get()
        health = result.value or Health(
            program="metaserver", ready=False, reason="the database has not answered yet"
        )
        reason = result.error.message if result.error is not None else self._describe_silence()
        if reason:
            health = replace(health, ready=False, reason=reason)
        details = health.details | {"age_ms": round(result.age_s * 1000)}
        return replace(health, details=details)

    async def close(self) -> None:
        """Cancel a running read."""
        await self._cache.close()

    def _describe_silence(self) -> str:
        silence = self._database.describe_silence()
        return f"the database does not answer: {silence}" if silence else ""

    async def _read(self) -> Health:
        """Read the health from the database. Raises StorageError."""
        problem = await self._database.problem()
        cluster = None if self._member is None else await self._member.read_state()
        brokers = [
            replace(view, refused_copies=self._refused_copies(view.broker_group))
            for view in await self._database.read(broker_views)
        ]
        refused_brokers = await self._database.read(refused_views)
        loss_error = await self._database.read(database_lost_error)
        details = {
            "database": self._database.name,
            "brokers": to_builtins(brokers),
            "refused": to_builtins(refused_brokers),
        }
        if cluster is not None:
            details["cluster"] = to_builtins(cluster_view(cluster))
        reason = f"the database cannot be written: {problem}" if problem else ""
        if self._member is not None:
            reason = reason or self._member.problem
        if loss_error is not None:
            reason = f"{loss_error.message}; {loss_error.hint}"
            details["advice"] = loss_error.hint
        return Health(program="metaserver", ready=not reason, reason=reason, details=details)
