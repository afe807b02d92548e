"""A running metaserver: its database, its periodic work and its server, started and ended together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from msgspec import to_builtins

from ..protocol import endpoints
from ..protocol.clock import Clock, SystemClock
from ..protocol.control import Health
from ..protocol.errors import StorageError
from ..rpc.http_network import HttpNetwork
from ..rpc.intake import HttpLimits
from ..rpc.listening import check_free
from ..rpc.network import Network
from ..rpc.race import Race
from ..rpc.server import ControlRoute, Server, document_route
from .attendant import Attendant
from .calls import control_routes
from .catalogue.service import Catalogue
from .groups.service import GroupService
from .operations.driver import OperationDriver
from .removals.service import RemovalService
from .resets.live import LiveResets
from .resets.service import ResetService
from .retention.announcer import Announcer
from .retention.expirer import Expirer
from .retention.group_expirer import GroupExpirer
from .settings import MetaserverSettings, machine_boot, prepare_folder
from .sql.database import open_database
from .sql.write_watch import WatchedDatabase
from .starts.service import StartService
from .verify.service import VerifyService


class RunningMetaserver:
    """A metaserver that listens; made by `running_metaserver`."""

    def __init__(self, server: Server, attending: asyncio.Task[None]) -> None:
        self._server = server
        self._attending = attending

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
    check_free(settings.host, settings.port)
    folder = prepare_folder(settings.data)
    clock = clock or SystemClock()
    async with AsyncExitStack() as stack:
        if network is None:
            network = own = HttpNetwork()
            stack.push_async_callback(own.close)
        opened = await stack.enter_async_context(
            open_database(
                folder=folder,
                url=settings.database_url,
                clock=clock,
                boot=machine_boot(),
                broker_ttl_ms=settings.broker_ttl_ms,
            )
        )
        database = WatchedDatabase(opened, clock)
        services = _services(database, network, settings, after_step)
        limits = HttpLimits(connections_max=settings.http_connections_max)
        server = Server(services.routes, limits=limits)
        await server.start(settings.host, settings.port)
        attending = asyncio.create_task(services.attendant.run())
        try:
            yield RunningMetaserver(server, attending)
        finally:
            services.groups.close()
            services.catalogue.close()
            await server.stop()
            attending.cancel()
            await asyncio.wait([attending])
            await services.operations.stop()
            await database.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Services:
    """The services over one database, and their routes."""

    catalogue: Catalogue
    groups: GroupService
    operations: OperationDriver
    attendant: Attendant
    routes: list[ControlRoute]


def _services(
    database: WatchedDatabase,
    network: Network,
    settings: MetaserverSettings,
    after_step: Callable[[str], None],
) -> _Services:
    """The services of one metaserver, under an id that no other metaserver has."""
    rng = random.SystemRandom()
    driver = f"{rng.getrandbits(128):032x}"
    catalogue = Catalogue(database, network, settings)
    announcer = Announcer(database, network, settings, catalogue=catalogue, holder=driver)
    expirer = Expirer(database, network, settings, catalogue=catalogue, holder=driver)
    starts = StartService(database, network, announce=announcer.announce, after_step=after_step)
    groups = GroupService(database, settings, announce=announcer.announce, begin=starts.begin)
    operations = OperationDriver(
        database,
        network,
        settings,
        catalogue=catalogue,
        groups=groups,
        driver=driver,
        rng=rng,
        after_step=after_step,
    )
    removals = RemovalService(
        database, network, catalogue=catalogue, groups=groups, after_step=after_step
    )
    resets = LiveResets(
        database,
        ResetService(database, network, settings, holder=driver, after_step=after_step),
        groups.settle,
    )
    group_expirer = GroupExpirer(database, settings, removals.delete_group, holder=driver)
    attendant = Attendant(
        database,
        groups,
        catalogue,
        settings,
        operations,
        duties=(expirer.run_once, group_expirer.run_once),
        removals=removals,
        quick_duties=(announcer.run_once, starts.resume, resets.resume),
    )
    health = partial(_health, database, catalogue)
    verify = VerifyService(database, network)
    routes = control_routes(
        catalogue, groups, health, operations, verify, resets, removals=removals, starts=starts
    )
    return _Services(
        catalogue=catalogue,
        groups=groups,
        operations=operations,
        attendant=attendant,
        routes=[*routes, document_route(endpoints.METASERVER, "metaserver")],
    )


async def _health(database: WatchedDatabase, catalogue: Catalogue) -> Health:
    problem = await database.problem()
    try:
        brokers = await catalogue.brokers()
        refused = await catalogue.refused()
        lost = await catalogue.lost()
    except StorageError as error:
        return Health(program="metaserver", ready=False, reason=error.message)
    details = {
        "database": database.name,
        "brokers": to_builtins(brokers),
        "refused": to_builtins(refused),
    }
    reason = f"the database cannot be written: {problem}" if problem else ""
    if lost is not None:
        reason = reason or f"{lost.message}; {lost.hint}"
    return Health(program="metaserver", ready=not reason, reason=reason, details=details)
