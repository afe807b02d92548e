"""Reports whether a metaserver is ready for clients, and if not, why. The answer comes within a
second even if the database does not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import to_builtins
from msgspec.structs import replace

from ..protocol.control import Health
from .catalogue.service import Catalogue
from .membership import ClusterMember, cluster_view
from .remembered import Remembered
from .sql.database import Database


class HealthyDatabase(Database, Protocol):
    """A database that reports its health and its new connections."""

    @property
    def name(self) -> str:
        """The kind of the database: "sqlite" or "postgresql"."""
        ...

    async def problem(self) -> str:
        """Return the reason why the database cannot be written now, or ""."""
        ...

    def silence(self) -> str:
        """Return for how long the database has not answered, as a text, or "" if it answers."""
        ...

    def on_new_connection(self, call: Callable[[], None]) -> None:
        """Register a callback for each new connection: the server behind it may be another one, for
        example a replica that lacks commits.
        """
        ...


class MetaserverHealth:
    """The health of one metaserver."""

    def __init__(
        self, database: HealthyDatabase, catalogue: Catalogue, member: ClusterMember | None
    ) -> None:
        self._database = database
        self._catalogue = catalogue
        self._member = member
        self._known = Remembered(self._read)

    async def now(self) -> Health:
        """Return the present health, or the last known one if the database does not answer in time;
        `details.age_ms` is its age.
        """
        recalled = await self._known.ask()
        health = recalled.value or Health(
            program="metaserver", ready=False, reason="the database has not answered yet"
        )
        reason = recalled.error.message if recalled.error is not None else self._silence()
        if reason:
            health = replace(health, ready=False, reason=reason)
        details = health.details | {"age_ms": round(recalled.age_s * 1000)}
        return replace(health, details=details)

    async def close(self) -> None:
        """End a reading that is running."""
        await self._known.close()

    def _silence(self) -> str:
        silence = self._database.silence()
        return f"the database does not answer: {silence}" if silence else ""

    async def _read(self) -> Health:
        """Read the health from the database. Raises StorageError."""
        problem = await self._database.problem()
        cluster = None if self._member is None else await self._member.state()
        brokers = await self._catalogue.brokers()
        refused = await self._catalogue.refused()
        lost = await self._catalogue.lost()
        details = {
            "database": self._database.name,
            "brokers": to_builtins(brokers),
            "refused": to_builtins(refused),
        }
        if cluster is not None:
            details["cluster"] = to_builtins(cluster_view(cluster))
        reason = f"the database cannot be written: {problem}" if problem else ""
        if self._member is not None:
            reason = reason or self._member.problem
        if lost is not None:
            reason = f"{lost.message}; {lost.hint}"
            details["advice"] = lost.hint
        return Health(program="metaserver", ready=not reason, reason=reason, details=details)
