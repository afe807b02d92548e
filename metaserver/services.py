"""Builds the services of a metaserver on one database, with their periodic work and routes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..protocol import endpoints
from ..protocol.clock import Clock
from ..rpc.network import Network
from ..rpc.server import ControlRoute, Params, document_route, front_route
from .access.service import refusing_routes
from .calls import control_routes
from .catalogue.service import Catalogue
from .cluster.broker_watch import BrokerWatch
from .groups.service import GroupService
from .health import HealthyDatabase, MetaserverHealth
from .membership import ClusterMember
from .operations.balancing import Balancer
from .operations.driver import OperationDriver
from .periodic_tasks import PeriodicTasks
from .publications.service import PublicationService
from .removals.service import RemovalService
from .resets.live import LiveResets
from .resets.service import ResetService
from .retention.announcer import Announcer
from .retention.empty_partitions import PartitionExpirer
from .retention.hidden_subjects import HiddenExpirer
from .retention.history import HistoryExpirer
from .retention.idle_groups import GroupExpirer
from .settings import MetaserverSettings
from .sql.told_history import ToldHistory
from .starts.service import StartService
from .verify.agreement import AgreementWatch
from .why import WhyService

if TYPE_CHECKING:
    from .access.service import AccessService


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services of a metaserver on one database, and their routes."""

    catalogue: Catalogue
    groups: GroupService
    operations: OperationDriver
    balancer: Balancer
    periodic_tasks: PeriodicTasks
    health: MetaserverHealth
    routes: list[ControlRoute]

    def close(self) -> None:
        """Reply to all waiting calls before the server stops."""
        self.groups.close()
        self.catalogue.close()


def build_services(
    database: HealthyDatabase,
    network: Network,
    settings: MetaserverSettings,
    *,
    clock: Clock,
    rng: random.Random,
    after_step: Callable[[str], None] = lambda _step: None,
    access: AccessService | None = None,
    member: ClusterMember | None = None,
    told_history: ToldHistory | None = None,
) -> Services:
    """
    Build the services of one metaserver and give it a unique id.

    Args:
        network: connects to brokers.
        clock: tells the time to those who ask why messages do not arrive.
        rng: generates the id and the backoff times.
        after_step: called with the name of each finished step of an operation or a reset.
        access: access control; if None, every caller has every right.
        member: checks the versions of brokers; if None, they are not checked.
        told_history: remembers how many changes of copies were told, beside an SQLite file.
    """
    driver = f"{rng.getrandbits(128):032x}"
    news = None if access is None else access.news
    agreement = AgreementWatch(database, network)
    catalogue = Catalogue(
        database,
        network,
        settings,
        news=news,
        member=member,
        request_comparison=agreement.request_comparison,
        told_history=told_history,
    )
    announcer = Announcer(database, network, settings, catalogue=catalogue, holder=driver)
    partition_expirer = PartitionExpirer(
        database, network, settings, catalogue=catalogue, holder=driver
    )
    starts = StartService(database, network, announce=announcer.announce, after_step=after_step)
    locked = database.name == "postgresql"
    groups = GroupService(
        database,
        settings,
        announce=announcer.announce,
        create_group=starts.begin,
        rows_are_locked=locked,
    )
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
    balancer = Balancer(
        database,
        network,
        settings,
        operations,
        holder=driver,
        wait_until_settled=agreement.wait_until_settled,
        hand_over=catalogue.hand_over,
    )
    publications = PublicationService(
        database, settings, catalogue=catalogue, operations=operations, after_step=after_step
    )
    removals = RemovalService(
        database, network, catalogue=catalogue, groups=groups, after_step=after_step
    )
    reset_service = ResetService(database, network, settings, holder=driver, after_step=after_step)
    resets = LiveResets(database, reset_service, groups.settle)
    history_expirer = HistoryExpirer(database, settings, holder=driver)
    group_expirer = GroupExpirer(database, settings, removals.delete_group, holder=driver)
    hidden_expirer = HiddenExpirer(
        database, network, settings, removals.delete_subject, catalogue=catalogue, holder=driver
    )
    periodic_tasks = PeriodicTasks(
        database,
        groups,
        catalogue,
        settings,
        operations,
        duties=[
            each.run_once
            for each in (partition_expirer, group_expirer, hidden_expirer, history_expirer)
        ],
        removals=removals,
        quick_duties=(announcer.run_once, starts.resume, resets.resume),
        background=(agreement.run, BrokerWatch(database).run, balancer.run),
    )
    health = MetaserverHealth(database, member, catalogue.refused_copies)
    routes = control_routes(
        database,
        network,
        catalogue,
        groups,
        health.read_health,
        operations,
        resets=resets,
        removals=removals,
        starts=starts,
        publications=publications,
        balancer=balancer,
    )
    why = WhyService(routes, network, clock=clock)
    routes += [why.route(), *(refusing_routes() if access is None else access.routes())]
    database.on_new_connection(agreement.request_comparison)
    return Services(
        catalogue=catalogue,
        groups=groups,
        operations=operations,
        balancer=balancer,
        periodic_tasks=periodic_tasks,
        health=health,
        routes=[
            *(_database_route(route, agreement) for route in routes),
            document_route(endpoints.METASERVER, "metaserver"),
            front_route(
                endpoints.METASERVER,
                "metaserver",
                "Programs and `keylane --meta` take its address, without http://.",
            ),
        ],
    )


def _database_route(route: ControlRoute, agreement: AgreementWatch) -> ControlRoute:
    """Mark a route as one that uses the database. After a start or a new connection, a route that
    creates something on brokers also waits until the database has been compared with them.
    """
    route = replace(route, to_database=True)
    if route.endpoint not in _CREATING_ENDPOINTS:
        return route

    async def wait_for_agreement(body: Any, params: Params) -> object:
        await agreement.wait_until_settled()
        return await route.handler(body, params)

    return replace(route, handler=wait_for_agreement)


_CREATING_ENDPOINTS = (
    endpoints.CREATE_SUBJECT,
    endpoints.AUTO_CREATE,
    endpoints.DELETE_SUBJECT,
    endpoints.RESHAPE,
    endpoints.SET_SUBJECT,
    endpoints.HIDE_SUBJECT,
    endpoints.PUBLISH_SUBJECT,
    endpoints.CREATE_GROUP,
)
