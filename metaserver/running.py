"""A running metaserver: its database, its periodic work and its server, started and ended together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..protocol.clock import Clock, SystemClock
from ..rpc.access.guard import Guard
from ..rpc.access.settings import ON
from ..rpc.access.token_file import token_in_file
from ..rpc.intake import HttpLimits
from ..rpc.listening import check_free
from ..rpc.network import Network
from ..rpc.operating.metrics import ServerMetrics
from ..rpc.operating.probes import metrics_route
from ..rpc.operating.served_network import ServedNetwork
from ..rpc.race import Race
from ..rpc.server import Server
from .access.targets import MetaTargets
from .membership import ClusterMember
from .metrics import MetaserverMetrics
from .services import services_of
from .settings import MetaserverSettings, machine_boot, prepare_folder
from .sql.database import Database, open_database
from .sql.write_watch import WatchedDatabase

if TYPE_CHECKING:
    from .access.service import AccessService


class RunningMetaserver:
    """A metaserver that listens; made by `running_metaserver`."""

    def __init__(
        self, server: Server, attending: asyncio.Task[None], served: ServedNetwork
    ) -> None:
        self._server = server
        self._attending = attending
        self.adopt = served.adopt
        """Takes over what may change in a running metaserver: `settings.RELOADED`."""

    @property
    def address(self) -> str:
        """host:port where it listens."""
        return self._server.address

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Return when `stop` is set.  Raises what the periodic work failed with, if it met a bug."""
        async with Race() as race:
            race.start(stop.wait())
            race.start(asyncio.wait([self._attending]))
            await race.first()
        if self._attending.done():
            self._attending.result()


@asynccontextmanager
async def running_metaserver(
    settings: MetaserverSettings,
    *,
    network: Network | None = None,
    clock: Clock | None = None,
    after_step: Callable[[str], None] = lambda _step: None,
) -> AsyncIterator[RunningMetaserver]:
    """
    Run a metaserver in this event loop until the block ends.

    Args:
        network: how brokers are called; default: HTTP, closed at the end.
        clock: its boot time is SQLite's time; default: the machine's.
        after_step: called with the name of each step of an operation on partitions and of a reset that was done.

    Raises:
        ConfigError, DataFolderError, StorageError, AddressError
    """
    check_free(settings.host, settings.port, anywhere=settings.is_open)
    served = ServedNetwork(settings)
    folder = prepare_folder(settings.data)
    clock = clock or SystemClock()
    async with AsyncExitStack() as stack:
        opening = open_database(
            folder=folder, url=settings.database_url, clock=clock, boot=machine_boot(),
            broker_ttl_ms=settings.broker_ttl_ms, cluster=settings.cluster,
        )  # fmt: skip
        opened = await stack.enter_async_context(opening)
        database = WatchedDatabase(opened, clock)
        stack.push_async_callback(database.close)
        access = await _access(database, settings, clock)
        network = network or _own_network(stack, served, access)
        member = ClusterMember(database)
        await member.learn()
        services = services_of(
            database, network, settings, rng=random.SystemRandom(), after_step=after_step, access=access,
            member=member,
        )  # fmt: skip
        metrics = ServerMetrics("metaserver", clock.boot_ns)
        metrics.add(MetaserverMetrics(database, clock=clock).collect)
        metrics.add(served.collect)
        routes = [*services.routes, metrics_route(metrics)]
        server = Server(
            routes, limits=HttpLimits(connections_max=settings.http_connections_max), on_refusal=metrics.note_refusal, serving=settings, tls=served.tls,
            guard=_guard(access, database, clock))  # fmt: skip
        await server.start(settings.host, settings.port)
        await stack.enter_async_context(member.at_work(server.address))
        attending = asyncio.create_task(services.attendant.run())
        watching = [asyncio.create_task(metrics.watch_loop())]
        if access is not None:
            watching.append(asyncio.create_task(access.run()))
        try:
            yield RunningMetaserver(server, attending, served)
        finally:
            services.close()
            await server.stop()
            for task in (attending, *watching):
                task.cancel()
            await asyncio.wait([attending, *watching])
            await services.operations.stop()


def _own_network(
    stack: AsyncExitStack, served: ServedNetwork, access: AccessService | None
) -> Network:
    own = served.outgoing(identity=access)
    stack.push_async_callback(own.close)
    return own


def _guard(access: AccessService | None, database: Database, clock: Clock) -> Guard | None:
    if access is None:
        return None
    return Guard(access.identify, MetaTargets(database), clock=clock, version=access.version)


async def _access(
    database: Database, settings: MetaserverSettings, clock: Clock
) -> AccessService | None:
    """
    The access control of the metaserver, started; None: it has none.

    Raises:
        TokenInvalidError: a file has no token.
        StorageError
    """
    if settings.access != ON:
        return None
    from .access.service import ADMIN, CLUSTER, AccessService

    files = {ADMIN: settings.admin_token_file, CLUSTER: settings.cluster_token_file}
    tokens = {principal: token_in_file(Path(path)) for principal, path in files.items()}
    access = AccessService(database, clock=clock, files=tokens)
    await access.start()
    return access
