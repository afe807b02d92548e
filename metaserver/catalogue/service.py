"""Brokers and subjects: reports, creation in two steps, routes as a long poll.  Shell around the store.

    create ─▶ PLANNED rows in SQL ─▶ every broker hosts its part ─▶ OPEN rows, route version 1
                     │                          │ a broker fails, or this process ends
                     └◀── the same call again, or the attendant, goes on from here

Every step may be done twice: hosting is idempotent at the broker, planning and opening are in SQL.
What was planned on a broker that has gone silent is planned on another one, as long as the subject is not open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from ...protocol.address import check_broker_address
from ...protocol.control import (
    AcceptFolder,
    BrokerHeartbeat,
    BrokerView,
    BrokerWelcome,
    CreateSubject,
    HostPartition,
    RefusedBroker,
    SubjectList,
    SubjectView,
)
from ...protocol.errors import (
    BrokerGroupTakenError,
    CreationFailedError,
    DatabaseEmptyError,
    FolderBehindError,
    InvalidRequestError,
    KeylaneError,
    LossAcceptedError,
    NotEnoughBrokersError,
    NotSentError,
    PartitionInUseError,
    SubjectUnknownError,
)
from ...protocol.ids import Subject, check_name
from ...protocol.operations import Cordon
from ...protocol.queues import QueueList
from ...protocol.routing import OrderStrategy, Partition, PartitionState, Route
from ...protocol.text import counted
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..cluster.brokers import (
    broker_views,
    cordon_broker,
    find_broker,
    note_refused,
    refused_views,
    renew_broker,
    report_broker,
)
from ..cluster.heard import groups_missed
from ..cluster.lost_database import database_lost, is_empty
from ..cluster.queues import read_queues
from ..cluster.subjects import (
    SubjectRow,
    open_subject,
    plan_subject,
    planned_partitions,
    planned_subjects,
    read_route,
    read_subject,
    route_versions,
    subject_names,
    subject_summaries,
)
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..wakeups import Wakeups
from .accepted import accept_folder, accepted_fence, check_complete
from .creations import fail_creation, plan_creation_anew

log = logging.getLogger("keylane.metaserver")
T = TypeVar("T")

PROBE_TIMEOUT_MS = 1_000
REPORTS_MS_MIN = 2_000
"""Every broker that lives has reported itself by then: it tries again each second while a metaserver is away."""
PLANS_MAX = 4
"""How often one call plans a creation anew."""
HOSTED_AT_ONCE_MAX = 64
"""Calls to brokers at the same time; each waits for a disk, and the broker gathers them into one flush."""


class Catalogue:
    """What there is: broker groups, subjects, routes."""

    def __init__(self, database: Database, network: Network, settings: MetaserverSettings) -> None:
        self._database = database
        self._network = network
        self._settings = settings
        self._wakeups: Wakeups[Subject] = Wakeups()
        self._versions: dict[str, int] = {}
        self._patient_until: float | None = None
        """By the event loop's time; None: no subject was unknown yet."""
        self._untold: dict[str, tuple[int, ...]] = {}
        """Broker group → partitions of which it was never told the consumer groups."""

    # ── brokers ───────────────────────────────────────────────────────────────────────────────────────
    async def report(self, report: BrokerHeartbeat) -> BrokerWelcome:
        """
        A broker reports itself.

        Raises:
            InvalidNameError, InvalidRequestError
            BrokerAddressError: it is not on loopback.
            BrokerGroupTakenError: its group is another data folder's, or its folder is a copy of one in use.
            FolderBehindError: its folder is an older copy of one that was in use.
            LossAcceptedError: the loss of its folder was accepted.
        """
        check_name("broker group", report.broker_group)
        if not report.broker_id.isprintable() or not report.broker_id:
            raise InvalidRequestError("broker_id must be printable text")
        check_broker_address(report.address)
        settings = self._settings
        ttl_ms = settings.broker_ttl_ms
        renewed = await self._database.renew(renew_broker, report, ttl_ms=ttl_ms)
        if not renewed:
            try:
                await self._check_no_copy(report)
                changed = await self._database.write_first(report_broker, report, ttl_ms=ttl_ms)
            except (BrokerGroupTakenError, FolderBehindError, LossAcceptedError) as error:
                if not await self._is_past(report):
                    await self._database.write(note_refused, report, error.message, ttl_ms=ttl_ms)
                raise
            self._wakeups.wake(await self._database.read(subject_names, changed))
        if report.untold:
            self._untold[report.broker_group] = report.untold
        missed, fence = False, 0
        if not renewed or report.opened_after:  # the broker may not have read an answer yet
            missed = await self._database.read(groups_missed, report.broker_group)
            fence = await self._database.read(accepted_fence, report.broker_group)
        return BrokerWelcome(
            heartbeat_ms=settings.broker_heartbeat_ms,
            ttl_ms=settings.broker_ttl_ms,
            groups_missed=missed,
            fence=fence,
        )

    def take_untold(self) -> list[tuple[int, ...]]:
        """Partitions whose brokers asked for their consumer groups since the last call, for each broker."""
        untold, self._untold = self._untold, {}
        return list(untold.values())

    async def _check_no_copy(self, report: BrokerHeartbeat) -> None:
        """
        A broker may move to another address; but a folder that is in use at the old one too has been copied.

        Raises:
            BrokerGroupTakenError: another opening of the same data folder answers at the old address.
        """
        known = await self._database.read(find_broker, report.broker_group)
        if known is None or known.broker_id != report.broker_id or known.address == report.address:
            return
        try:
            there, opening = await self._identity(known.address)
        except KeylaneError:
            return  # nobody there: the broker has moved
        if opening and opening == report.opening:
            return  # the same broker under another name of its host
        if there == report.broker_id:
            raise BrokerGroupTakenError(
                f"the data folder of broker group {report.broker_group!r} is in use at {known.address} "
                f"too: the one at {report.address} is a copy",
                broker_group=report.broker_group,
                address=known.address,
            )

    async def _is_past(self, report: BrokerHeartbeat) -> bool:
        """
        A refused report that is no second broker's: it came late, from where the broker was before it moved.

        So it is if the data folder is the known one, and nobody listens at the address, or another than who reported:
        another program, a broker of another data folder, or another opening of the same.
        """
        known = await self._database.read(find_broker, report.broker_group)
        if known is None or known.broker_id != report.broker_id:
            return False
        if known.alive and known.address == report.address:
            return True  # two brokers do not listen there: it is of an opening before
        try:
            broker_id, opening = await self._identity(report.address)
        except (NotSentError, InvalidRequestError):  # nobody, or no broker
            return True
        except KeylaneError:
            return False  # who does not answer may be there
        return (broker_id, opening or report.opening) != (report.broker_id, report.opening)

    async def _identity(self, address: str) -> tuple[str, str]:
        """
        Which data folder is in use at an address, and its opening.

        Raises:
            NotSentError, OutcomeUnknownError
            InvalidRequestError: another program listens there.
        """
        broker = BrokerClient(self._network, address, timeout_ms=PROBE_TIMEOUT_MS)
        details = (await broker.health()).details
        return str(details.get("broker_id", "")), str(details.get("opening", ""))

    async def accept_folder(self, broker_group: str, ask: AcceptFolder) -> RefusedBroker:
        """
        Go on with a data folder that is refused because it is behind.

        Raises:
            InvalidNameError, BrokerGroupUnknownError, InvalidRequestError
            NotSentError, OutcomeUnknownError: what is in the folder could not be asked.
        """
        would = replace(ask, dry_run=True)
        copy = await self._database.write(accept_folder, broker_group, would)
        hosted = await BrokerClient(self._network, copy.address).partitions()
        await self._database.read(check_complete, broker_group, hosted.partitions)
        if ask.dry_run:
            return copy
        accepted = await self._database.write(accept_folder, broker_group, ask)
        log.warning(
            "broker group %s goes on with the data folder at %s, whose log ends at %d; it had come to %d",
            broker_group, accepted.address, accepted.log_end, accepted.known_log_end,
        )  # fmt: skip
        return accepted

    async def lost(self) -> DatabaseEmptyError | None:
        """Why this database cannot be the one that the brokers' partitions come from; None if it may be."""
        return await self._database.read(database_lost)

    async def refused(self) -> list[RefusedBroker]:
        """The brokers that report themselves and are refused, by broker group."""
        return await self._database.read(refused_views)

    async def cordon(self, broker_group: str, ask: Cordon) -> BrokerView:
        """Keep a broker group from new partitions, or no longer.  Raises InvalidNameError, BrokerGroupUnknownError."""
        await self._database.write(cordon_broker, broker_group, ask.cordoned)
        views = await self._database.read(broker_views)
        return next(one for one in views if one.broker_group == broker_group)

    async def brokers(self) -> list[BrokerView]:
        """Every broker group known, by name."""
        return await self._database.read(broker_views)

    # ── subjects ──────────────────────────────────────────────────────────────────────────────────────
    async def create(self, ask: CreateSubject) -> SubjectView:
        """
        Create a subject and have its partitions hosted; again with the same settings changes nothing.

        Raises:
            InvalidNameError, SubjectExistsError
            NotEnoughBrokersError: none is there, or one did not take its part; the same call again goes on.
            CreationFailedError: a broker refused its part for good; nothing is open, and the name is free.
            DatabaseEmptyError: this database is not the one that the brokers' partitions come from.
        """
        row = await self._database.write(
            plan_subject, ask, subjects_max=self._settings.subjects_max
        )
        if row.route_version == 0:
            await self._complete(row)
        return await self.subject(row.name)

    async def repair(self) -> None:
        """
        Go on with creations that were cut short; one that cannot go on holds up no other.

        Raises:
            StorageError: which they are is not known.
        """
        for row in await self._database.read(planned_subjects):
            try:
                await self._complete(row)
            except CreationFailedError as error:
                log.warning("%s", error.message)
            except KeylaneError as error:
                log.info("%s", error.message)

    async def _complete(self, row: SubjectRow) -> None:
        """
        Have every planned partition hosted, elsewhere if its broker has gone, and open the subject.

        Raises:
            NotEnoughBrokersError: a broker did not take its part, and there is no other.
            CreationFailedError: a broker refused its part for good.
        """
        problem = ""
        for _ in range(PLANS_MAX):
            planned = await self._database.read(planned_partitions, row.subject_id)
            if not planned:
                return  # another metaserver has opened it
            problem = await self._host_all(row, planned)
            if not problem:
                hosted = [one.partition_id for one in planned]
                if await self._database.write(open_subject, row.name, hosted):
                    self._wakeups.wake([row.name])
                    return
            elif not await self._database.write(plan_creation_anew, row.subject_id):
                break
        raise NotEnoughBrokersError(
            f"{problem or 'its plan has changed meanwhile'}; the creation goes on by itself when its "
            "broker takes it, or on another one once that is silent",
            subject=row.name,
        )

    async def _host_all(self, row: SubjectRow, planned: Sequence[Partition]) -> str:
        """
        Have brokers host partitions; why some are not hosted, "" if all are.

        Raises:
            CreationFailedError: a broker refused its part for good.
        """
        in_use: dict[int, str] = {}
        room = asyncio.Semaphore(HOSTED_AT_ONCE_MAX)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._host(row, one, room, in_use)) for one in planned]
        if in_use:
            await self._fail(row, in_use)
        refused = [task.result() for task in tasks if task.result()]
        if not refused:
            return ""
        count = f"{len(refused)} of {counted(len(planned), 'partition')} of {row.name!r}"
        return f"{count} have no broker yet: {refused[0]}"

    async def _fail(self, row: SubjectRow, in_use: Mapping[int, str]) -> None:
        """Give a creation up whose numbers of partitions are in use; nothing if another metaserver has opened it."""
        problem = (
            f"the creation of {row.name!r} failed: {next(iter(in_use.values()))}; the number was given away "
            "before, by a database that was newer or another one"
        )
        if await self._database.write(fail_creation, row.subject_id, problem, in_use=set(in_use)):
            raise CreationFailedError(problem, subject=row.name)

    async def _host(
        self,
        row: SubjectRow,
        partition: Partition,
        room: asyncio.Semaphore,
        in_use: dict[int, str],
    ) -> str | None:
        """
        Have a broker host a partition; the reason if it did not: it is asked again.

        Args:
            in_use: gets the reason for a partition that is refused for good, because it is in use there.
        """
        if partition.address is None:
            return f"broker group {partition.broker_group!r} is silent"
        # PLANNED is a word of the metaserver; the broker learns of a partition that takes messages.
        body = HostPartition(
            subject=row.name,
            partition=replace(partition, state=PartitionState.OPEN),
            order_strategy=row.order_strategy,
            partitions_wanted=row.partitions_wanted,
            retention=row.retention,
            static=row.static,
            groups=(),  # nobody can join before the subject is open
        )
        async with room:
            try:
                await BrokerClient(self._network, partition.address).host_partition(body)
            except PartitionInUseError as error:
                in_use[partition.partition_id] = (
                    f"broker group {partition.broker_group!r}: {error.message}"
                )
            except KeylaneError as error:
                return f"broker group {partition.broker_group!r}: {error.message}"
        return None

    async def subjects(self) -> SubjectList:
        """All open subjects, by name."""
        return SubjectList(subjects=await self._database.read(subject_summaries))

    async def subject(self, name: str) -> SubjectView:
        """One subject.  Raises SubjectUnknownError."""
        return await self._database.read(read_subject, name)

    async def queues(self, name: str) -> QueueList:
        """The logic queues of a static subject.  Raises SubjectUnknownError, SubjectNotStaticError."""
        return await self._database.read(read_queues, name)

    async def retry_while_empty(self, ask: Callable[[], Awaitable[T]]) -> T:
        """
        What `ask` answers; where it knows no such subject, and the database none at all, once more a little later.

        Right after a start brokers have not reported themselves yet, and only they can tell an empty database from a
        lost one.  Clients end when a subject is unknown, and wait when a database is lost.
        """
        try:
            return await ask()
        except SubjectUnknownError:
            loop = asyncio.get_running_loop()
            if self._patient_until is None:
                wait_ms = max(REPORTS_MS_MIN, 2 * self._settings.broker_heartbeat_ms)
                self._patient_until = loop.time() + wait_ms / 1000
            left_s = self._patient_until - loop.time()
            if left_s <= 0 or not await self._database.read(is_empty):
                raise
        await asyncio.sleep(left_s)
        return await ask()

    # ── routes ────────────────────────────────────────────────────────────────────────────────────────
    async def route(
        self,
        name: str,
        *,
        known_version: int = -1,
        wait_ms: int = 0,
        order_strategy: OrderStrategy | None = None,
    ) -> Route:
        """
        The route, as soon as it is newer than `known_version`, or after `wait_ms`.

        Raises:
            InvalidNameError, SubjectUnknownError, StrategyMismatchError
        """
        with self._wakeups.listen(Subject(name)) as waiter:
            route = await self._database.read(read_route, name, order_strategy=order_strategy)
            if route.version > known_version or not wait_ms:
                return route
            if self._versions.setdefault(name, route.version) <= route.version:
                await waiter.wait(wait_ms)
                if not waiter.woken:
                    return route
        return await self._database.read(read_route, name, order_strategy=order_strategy)

    async def check_for_changes(self) -> None:
        """Wake those who wait for routes that another metaserver changed."""
        names = self._wakeups.keys()
        if not names:
            self._versions.clear()
            return
        versions = await self._database.read(route_versions, names)
        self._wakeups.wake(
            Subject(name)
            for name, version in versions.items()
            if self._versions.get(name, version) != version
        )
        self._versions = versions

    def wake(self, names: Iterable[Subject]) -> None:
        """The routes of these subjects changed: answer those who wait for them."""
        self._wakeups.wake(names)

    def close(self) -> None:
        """Answer everybody who waits."""
        self._wakeups.wake_all()
