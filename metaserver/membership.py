"""A metaserver's membership in the cluster: registers the metaserver, raises the cluster's version,
and checks the versions of brokers.

every HEARTBEAT_S: renew own row ─▶ lowest version of all members ─▶ the cluster's version
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ..protocol.control import BrokerHeartbeat
from ..protocol.errors import KeylaneError, VersionError
from ..protocol.log_filter import LogFilter
from ..protocol.membership.versions import OWN, VERSION, check_member, members_holding_back
from ..protocol.membership.views import ClusterView, MemberView
from .cluster.members import (
    ClusterState,
    read_cluster,
    register_metaserver,
    remove_metaserver,
    renew_metaserver,
)
from .sql.cluster_facts import check_cluster
from .sql.database import Database

log = logging.getLogger("keylane.metaserver")

HEARTBEAT_S = 5.0
TTL_MS = 15_000
"""Time, in milliseconds, after which a killed metaserver no longer delays an upgrade."""


def cluster_view(state: ClusterState) -> ClusterView:
    """Convert the cluster's state to the view for operators."""
    return ClusterView(
        name=state.name,
        version=str(state.version),
        members=tuple(MemberView(*member) for member in state.members),
        held_back_by=tuple(members_holding_back(state.version, state.members)),
    )


class ClusterMember:
    """
    One metaserver's membership in its cluster.

    Args:
        version: this program's version.
    """

    def __init__(self, database: Database, *, version: str = VERSION) -> None:
        self._database = database
        self._holder = secrets.token_hex(16)
        self._version = version
        self._state = ClusterState("", OWN, [])
        self.problem = ""
        """The reason why this metaserver must not serve, or ""."""

    @property
    def version(self) -> str:
        """The cluster's version as of the last read."""
        return str(self._state.version)

    async def load_state(self) -> None:
        """Read the cluster's name and version before the first broker sends a report. Raises
        StorageError.
        """
        self._state = await self.read_state()

    async def read_state(self) -> ClusterState:
        """Read the cluster's state. Raises StorageError."""
        return await self._database.read(read_cluster)

    async def send_heartbeat(self, address: str) -> None:
        """Register this metaserver and read the cluster's version. Raises StorageError."""
        values: dict[str, Any] = {
            "holder": self._holder,
            "address": address,
            "version": self._version,
            "ttl_ms": TTL_MS,
        }
        state = await self._database.renew(renew_metaserver, **values)
        if state.raised_version > state.version:  # store it durably before any broker is told
            state = await self._database.write_urgent(register_metaserver, **values)
        self._state = state
        try:
            check_member(self._version, self._state.version, "this metaserver")
        except VersionError as error:
            # For example, it was suspended while the other members were upgraded.
            if not self.problem:
                log.error("%s; %s", error.message, error.hint)
            self.problem = error.message

    @asynccontextmanager
    async def registration(self, address: str) -> AsyncIterator[None]:
        """Register this metaserver until the block ends."""
        await self.send_heartbeat(address)
        heartbeat = asyncio.create_task(self._heartbeat_loop(address))
        try:
            yield
        finally:
            heartbeat.cancel()
            await asyncio.wait([heartbeat])
            await self._leave()

    async def _heartbeat_loop(self, address: str) -> None:
        failures, event_loop = LogFilter(), asyncio.get_running_loop()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self.send_heartbeat(address)
            except KeylaneError as error:
                now_ms = round(event_loop.time() * 1000)
                if failure_text := failures.count_failure(error.message, now_ms):
                    log.warning("cannot register this metaserver in the database: %s", failure_text)
            else:
                if failures_text := failures.end_failures(round(event_loop.time() * 1000)):
                    log.warning("this metaserver is registered again, after %s", failures_text)

    async def _leave(self) -> None:
        try:
            await self._database.write(remove_metaserver, holder=self._holder)
        except KeylaneError as error:
            log.debug("cannot remove this metaserver's registration: %s", error.message)

    def check(self, report: BrokerHeartbeat) -> None:
        """
        Check that a broker may belong to this cluster.

        Raises:
            ConflictError: it is configured for another cluster.
            VersionError: the cluster does not admit its version.
            InvalidRequestError: it does not report a valid version.
        """
        check_cluster(report.cluster, self._state.name, "the metaserver")
        check_member(report.version, self._state.version, f"broker group {report.broker_group}")
