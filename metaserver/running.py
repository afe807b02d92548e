"""A running metaserver: database open, attendant at work, server listening; all of it ends together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
from ..rpc.server import ControlRoute, Params, Server
from .attendant import Attendant
from .calls import control_routes
from .catalogue.service import Catalogue
from .groups.service import Members
from .openapi import openapi_document
from .operations.driver import OperationDriver
from .resets.service import Resetter
from .retention.announcer import Announcer
from .retention.expirer import Expirer
from .settings import MetaserverSettings, machine_boot, prepare_folder
from .sql.database import open_database
from .sql.write_watch import WatchedDatabase
from .verify.service import VerifyService

API_VERSION = "1"


class RunningMetaserver:
    """What `running_metaserver` hands out."""

    def __init__(self, server: Server, attending: asyncio.Task[None]) -> None:
        self._server = server
        self._attending = attending

    @property
    def address(self) -> str:
        """host:port where it listens."""
        return self._server.address

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Return when `stop` is set; raise if the periodic work met a fault of ours."""
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopped, self._attending], return_when=asyncio.FIRST_COMPLETED)
            if self._attending.done():
                self._attending.result()
        finally:
            stopped.cancel()


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
        network: how brokers are called; none: a real one, closed at the end.
        clock: its boot time is SQLite's time; none: the machine's.
        after_step: called with the name of each step of an operation on partitions, and of a reset.

    Raises:
        ConfigError, DataFolderError, StorageError, AddressError
    """
    check_free(settings.host, settings.port)
    folder = prepare_folder(settings.data)
    own: HttpNetwork | None = None
    if network is None:
        network = own = HttpNetwork()
    try:
        clock = clock or SystemClock()
        async with open_database(
            folder=folder,
            url=settings.database_url,
            clock=clock,
            boot=machine_boot(),
            broker_ttl_ms=settings.broker_ttl_ms,
        ) as opened:
            database = WatchedDatabase(opened, clock)
            catalogue = Catalogue(database, network, settings)
            rng = random.SystemRandom()
            driver = f"{rng.getrandbits(128):032x}"
            announcer = Announcer(database, network, settings, catalogue=catalogue, holder=driver)
            members = Members(database, settings, announce=announcer.announce)
            operations = OperationDriver(
                database,
                network,
                settings,
                catalogue=catalogue,
                members=members,
                driver=driver,
                rng=rng,
                after_step=after_step,
            )
            resetter = Resetter(database, network, settings, holder=driver, after_step=after_step)
            verify = VerifyService(database, network)
            health = partial(_health, database, catalogue)
            routes = control_routes(catalogue, members, health, operations, verify, resetter)
            routes.append(_document_route())
            server = Server(
                routes, limits=HttpLimits(connections_max=settings.http_connections_max)
            )
            await server.start(settings.host, settings.port)
            expirer = Expirer(database, network, settings, catalogue=catalogue, holder=driver)
            duties, quick = (expirer.look,), (announcer.look,)
            attendant = Attendant(
                database, members, catalogue, settings, operations, duties, quick_duties=quick
            )
            attending = asyncio.create_task(attendant.run())
            try:
                yield RunningMetaserver(server, attending)
            finally:
                members.close()
                catalogue.close()
                await server.stop()
                attending.cancel()
                await asyncio.wait([attending])
                await operations.stop()
                await database.close()
    finally:
        if own is not None:
            await own.close()


def _document_route() -> ControlRoute:
    document = openapi_document(endpoints.METASERVER, version=API_VERSION)

    async def openapi(_body: object, _params: Params) -> object:
        return document

    return ControlRoute(endpoints.OPENAPI, openapi)


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
