"""Starts and stops a complete metaserver: its database, its periodic work and its server."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from ..protocol.access.principals import ADMIN, BROKER, CLUSTER
from ..protocol.access.tokens import check_own_token, token_hash
from ..protocol.clock import Clock, SystemClock
from ..protocol.errors import ConfigError
from ..rpc.access.guard import Guard
from ..rpc.access.token_file import token_in_file
from ..rpc.intake import HttpLimits
from ..rpc.listening import check_free
from ..rpc.network import Network
from ..rpc.operating.metrics import ServerMetrics, access_metrics
from ..rpc.operating.probes import metrics_route
from ..rpc.operating.served_network import ServedNetwork
from ..rpc.pages import PageAnswer, PageRequest, PageRoute
from ..rpc.race import Race
from ..rpc.server import Server
from .access.targets import MetaserverTargets
from .membership import ClusterMember
from .metrics import MetaserverMetrics
from .services import build_services
from .settings import MetaserverSettings, machine_boot, prepare_folder
from .sql.database import Database, open_database
from .sql.told_history import ToldHistory
from .sql.write_watch import WatchedDatabase

if TYPE_CHECKING:
    from ..console.app import Console
    from .access.service import AccessService
    from .operations.balancing import Balancer

log = logging.getLogger("keylane.metaserver")


class RunningMetaserver:
    """A metaserver that accepts connections; created by `running_metaserver`."""

    def __init__(
        self,
        server: Server,
        periodic_work: asyncio.Task[None],
        served: ServedNetwork,
        balancer: Balancer,
        access: AccessService | None = None,
    ) -> None:
        self._server = server
        self._periodic_work = periodic_work
        self._served = served
        self._balancer = balancer
        self._access = access

    def apply_settings(self, settings: MetaserverSettings) -> None:
        """Apply the settings that may change while a metaserver is running, listed in
        `settings.RELOADED`.
        """
        if self._access is not None:
            audit = self._access.audit
            audit.retention_ms = settings.audit_retention_ms
            audit.rows_max = settings.audit_rows_max
            try:
                self._access.set_settings_tokens(_read_tokens(settings))
            except ConfigError as error:
                log.error("cannot reload the tokens: %s", error.message)
        self._served.adopt(settings)
        self._balancer.apply_settings(settings)

    @property
    def address(self) -> str:
        """The `host:port` on which it accepts connections."""
        return self._server.address

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises any unexpected error of the periodic work."""
        async with Race() as race:
            race.start(stop.wait())
            race.start(asyncio.wait([self._periodic_work]))
            await race.first()
        if self._periodic_work.done():
            self._periodic_work.result()


class LateConsole:
    """The console of a metaserver, which is loaded when somebody first looks at it."""

    def __init__(self, settings: MetaserverSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._console: Console | None = None
        self.address = ""
        """The address of the server, once it serves."""

    async def answer(self, request: PageRequest) -> PageAnswer:
        """Answer a browser."""
        if self._console is None:
            # The import takes a tenth of a second, in which the event loop would do nothing else.
            await asyncio.to_thread(import_module, "..console.app", __package__)
            from ..console.app import Console

            self._console = self._console or Console(
                self.address,
                tls=self._settings.client_tls(),
                is_guarded=self._settings.is_guarded,
                clock=self._clock,
            )
        return await self._console.answer(request)

    async def close(self) -> None:
        """End all pages that are open."""
        if self._console is not None:
            await self._console.close()


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
        network: connects to brokers; by default an HTTP network, which is closed at the end.
        clock: provides the boot time for an SQLite database; by default the machine's clock.
        after_step: called with the name of each finished step of an operation or a reset.

    Raises:
        ConfigError, DataFolderError, StorageError, AddressError
    """
    check_free(settings.host, settings.port, anywhere=settings.is_open)
    served_network = ServedNetwork(settings)
    folder = prepare_folder(settings.data)
    clock = clock or SystemClock()
    async with AsyncExitStack() as stack:
        database_context = open_database(
            folder=folder,
            url=settings.database_url,
            clock=clock,
            boot=machine_boot(),
            broker_ttl_ms=settings.broker_ttl_ms,
            cluster=settings.cluster,
        )
        database = WatchedDatabase(await stack.enter_async_context(database_context), clock)
        stack.push_async_callback(database.close)
        access = await _start_access(database, settings, clock)
        network = network or _open_network(stack, served_network, access)
        member = ClusterMember(database)
        await member.load_state()
        rng = random.SystemRandom()
        services = build_services(
            database,
            network,
            settings,
            clock=clock,
            rng=rng,
            after_step=after_step,
            access=access,
            member=member,
            told_history=ToldHistory(folder) if settings.database_url is None else None,
        )
        figures = MetaserverMetrics(database, services.groups.counts)
        metrics = _create_metrics(figures, clock, served_network)
        routes = [*services.routes, metrics_route(metrics)]
        limits = HttpLimits(connections_max=settings.http_connections_max)
        guard = _create_guard(access, database, clock, metrics)
        console = LateConsole(settings, clock)
        server = Server(
            routes,
            limits=limits,
            on_refusal=metrics.count_refusal,
            time_call=metrics.time_call,
            serving=settings,
            tls=served_network.tls,
            guard=guard,
            pages=[PageRoute("/console", console.answer)],
        )
        await server.start(settings.host, settings.port)
        console.address = server.address
        if access is not None:
            access.audit.buffer.server = f"metaserver {server.address}"
        await stack.enter_async_context(member.registration(server.address))
        periodic_work = asyncio.create_task(services.periodic_tasks.run())
        background = _start_background_tasks(metrics, access)
        try:
            yield RunningMetaserver(
                server, periodic_work, served_network, services.balancer, access
            )
        finally:
            services.close()
            await console.close()
            await server.stop()
            for task in (periodic_work, *background):
                task.cancel()
            await asyncio.wait([periodic_work, *background])
            await services.operations.stop()
            await services.health.close()
            await figures.close()


def _start_background_tasks(
    metrics: ServerMetrics, access: AccessService | None
) -> list[asyncio.Task[None]]:
    """Start the tasks that run alongside the periodic work."""
    background = [asyncio.create_task(metrics.watch_loop())]
    if access is not None:
        background += [asyncio.create_task(run()) for run in (access.run, access.audit.run)]
    return background


def _create_metrics(
    figures: MetaserverMetrics, clock: Clock, served_network: ServedNetwork
) -> ServerMetrics:
    metrics = ServerMetrics("metaserver", clock.boot_ns)
    metrics.add(figures.collect)
    metrics.add(served_network.collect)
    return metrics


def _open_network(
    stack: AsyncExitStack, served_network: ServedNetwork, access: AccessService | None
) -> Network:
    network = served_network.outgoing(identity=access)
    stack.push_async_callback(network.close)
    return network


def _create_guard(
    access: AccessService | None, database: Database, clock: Clock, metrics: ServerMetrics
) -> Guard | None:
    if access is None:
        return None
    guard = Guard(
        access.identify,
        MetaserverTargets(database),
        clock=clock,
        version=access.version,
        on_audit=access.audit.buffer.add,
        identify_peer=access.identify_peer,
    )
    metrics.add(access_metrics(guard, access.audit.buffer))
    return guard


async def _start_access(
    database: Database, settings: MetaserverSettings, clock: Clock
) -> AccessService | None:
    """
    Start access control. Return None if the settings do not enable it.

    Raises:
        ConfigError: a token file does not contain a valid token.
        StorageError
    """
    if not settings.is_guarded:
        return None
    from .access.audit_log import AuditLog
    from .access.service import AccessService

    audit = AuditLog(
        database,
        clock=clock,
        retention_ms=settings.audit_retention_ms,
        rows_max=settings.audit_rows_max,
    )
    issuer = None
    if settings.outside_issuer is not None:
        from .access.issuer import Issuer  # loads PyJWT, which other setups do not need

        issuer = Issuer(settings.outside_issuer, clock=clock)
    access = AccessService(
        database, clock=clock, settings_tokens=_read_tokens(settings), audit=audit, issuer=issuer
    )
    await access.start()
    return access


def _read_tokens(settings: MetaserverSettings) -> dict[str, str]:
    """Return a dict that maps the hash of each token in the settings to its principal. Raises
    ConfigError.
    """
    principals = {}
    for path, principal in (
        (settings.admin_token_file, ADMIN),
        (settings.cluster_token_file, CLUSTER),
    ):
        if path is not None:
            principals[token_hash(check_own_token(token_in_file(path), path))] = principal
    if settings.admin_token_hash:
        principals[settings.admin_token_hash] = ADMIN
    for entry in settings.broker_token_hashes:
        name, _, hash_text = entry.partition(":")
        principals[hash_text] = BROKER + name
    return principals
