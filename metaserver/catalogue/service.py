"""Manages brokers and subjects: reports, two-step creation, and long polls for routes. Does network
I/O and runs SQL.

    create ─▶ PLANNED rows in SQL ─▶ every broker hosts its part ─▶ OPEN rows, route version 1
                     │                          │ a broker fails, or this process ends
                     └◀── a repeated call, or a periodic task, continues here

Every step is idempotent, both planning and opening in SQL and hosting at the broker.
Until the subject is open, partitions planned on a silent broker move to another broker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from msgspec.structs import replace
from sqlalchemy.engine import Connection

from ...protocol import endpoints
from ...protocol.access.capability import AccessNews
from ...protocol.address import check_broker_address
from ...protocol.control import (
    AcceptFolder,
    AutoCreate,
    BrokerHeartbeat,
    BrokerView,
    BrokerWelcome,
    CreateSubject,
    HostPartition,
    RefusedBroker,
    SubjectList,
    SubjectView,
    hosted_limit,
    quiet_limit_ms,
)
from ...protocol.copies import CopySet, HandedOver, HandOver, PromoteCopy, TakeOver
from ...protocol.errors import (
    ConflictError,
    FolderRefusedError,
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    Reason,
    SubjectDeletedError,
    SubjectUnknownError,
    UnavailableError,
    UnfinishedError,
)
from ...protocol.ids import Subject, check_name
from ...protocol.operations import Cordon
from ...protocol.routing import OrderStrategy, Partition, PartitionState, Route
from ...protocol.text import counted
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..cluster.announcements import lacks_announced_groups
from ..cluster.brokers import (
    broker_views,
    cordon_broker,
    find_broker,
    renew_broker,
    store_refusal,
    store_report,
)
from ..cluster.copy_sets import check_no_operation, promote_copy, read_copy_set
from ..cluster.fall_backs import needs_note, note_history, read_history
from ..cluster.lost_database import has_higher_id, is_empty
from ..cluster.removals import deletion_expires, extend_deletion_record
from ..cluster.rows import SubjectRow
from ..cluster.subjects import (
    check_not_deleted,
    find_subject,
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
from ..membership import ClusterMember
from ..settings import MetaserverSettings
from ..sql.cluster_facts import read_cluster_id
from ..sql.database import Database
from ..sql.told_history import ToldHistory
from ..wakeups import Wakeups
from .accepted import (
    accept_complete_folder,
    accept_folder,
    check_folder_complete,
    read_accepted_fence,
)
from .creations import fail_creation, replan_creation
from .recent import Recent
from .waiting_producers import WaitingProducers

log = logging.getLogger("keylane.metaserver")
T = TypeVar("T")

PROBE_TIMEOUT_MS = 1_000
TAKE_OVER_START_MS = 5_000
"""How long a copy that has taken the place of a broker may take to start, in milliseconds."""
LOOK_TIMEOUT_MS = 500
"""How long a metaserver looks whether a broker is gone, in milliseconds."""
REPORTS_MS_MIN = 2_000
"""Minimum time, in milliseconds, to wait for the reports of live brokers after a start. A broker
retries every second while no metaserver responds.
"""
PLANS_MAX = 4
"""Maximum number of times that one call tries to plan a creation."""
HOSTED_AT_ONCE_MAX = 64
"""Maximum number of concurrent calls to brokers; each waits for an fsync, and brokers sync many of
them at once.
"""


CREATION_WAIT_S = 5.0
"""How long, in seconds, a call waits for a creation, which continues after that; well below the
timeouts of clients.
"""


@dataclass(slots=True)
class _Creation:
    """A creation in progress, shared by all calls that are waiting for it."""

    hosted: set[int] = field(default_factory=set)
    """Ids of the partitions that are already hosted."""
    task: asyncio.Task[None] | None = None


def _now_ms() -> float:
    return asyncio.get_running_loop().time() * 1000


class Catalogue:
    """Manages the broker groups, subjects and routes of one database."""

    def __init__(
        self,
        database: Database,
        network: Network,
        settings: MetaserverSettings,
        *,
        news: Callable[[], AccessNews] | None = None,
        member: ClusterMember | None = None,
        request_comparison: Callable[[str], None] = lambda _broker_group: None,
        told_history: ToldHistory | None = None,
    ) -> None:
        """
        Args:
            told_history: remembers how many changes of copies were told, beside an SQLite file.
            news: returns the access state to send to brokers; None if there is no access control.
            member: checks which brokers may join the cluster; None allows all.
            request_comparison: called with a broker group that may have partitions or changes that
                the database lacks.
        """
        self._request_comparison = request_comparison
        self._told_history = told_history
        self._history = 0 if told_history is None else told_history.changes
        """The highest number of changes of copies that this metaserver knows of."""
        self._quarantined: set[str] = set()
        """The broker groups of whose quarantine the log has last said that it has begun."""
        self._database = database
        self._member = member
        self._news = news
        self._network = network
        self._settings = settings
        self._wakeups: Wakeups[Subject] = Wakeups()
        self._versions: dict[str, int] = {}
        self._retry_until_s: float | None = None
        """Time until which lookups of unknown subjects are retried, in seconds on the event loop's
        clock; None before the first unknown subject.
        """
        self._unannounced: dict[str, tuple[int, ...]] = {}
        """Maps each broker group to the ids of those partitions whose consumer groups were never
        announced.
        """
        self.waiting_producers = WaitingProducers(_now_ms)
        self._refused_copies: Recent[tuple[str, str], str] = Recent(_now_ms)
        """By broker group and copy, why the copy did not get the broker's place when it asked."""
        self._creations: dict[int, _Creation] = {}
        """Maps each subject id to its running creation."""

    # ── brokers ───────────────────────────────────────────────────────────────────────────────────
    async def process_report(self, report: BrokerHeartbeat) -> BrokerWelcome:
        """
        Process a broker's report; the first report registers the broker.

        Raises:
            InvalidRequestError: the report is invalid, or the broker's address is not a loopback
                address even though this metaserver serves only the loopback interface.
            FolderRefusedError: the broker group belongs to another data folder, the folder is an
                older copy or a copy of one in use, or the loss of the folder was accepted.
            ConflictError: the broker belongs to another cluster.
            VersionError: the cluster does not admit the broker's version.
        """
        check_name("broker group", report.broker_group)
        if not report.broker_id.isprintable() or not report.broker_id:
            raise InvalidRequestError("broker_id must be printable text")
        if self._member is not None:
            self._member.check(report)
        settings = self._settings
        check_broker_address(report.address, anywhere=settings.is_open)
        ttl_ms = settings.broker_ttl_ms
        await self._note_history(report.history)
        renewed, has_new_ids = await self._database.renew(
            _renew_unless_changed, report, ttl_ms=ttl_ms
        )
        if not renewed:
            try:
                await self._check_no_copy(report)
                changed_ids = await self._database.write_urgent(store_report, report, ttl_ms=ttl_ms)
            except FolderRefusedError as error:
                if not (await self._steps_back(report) or await self._is_outdated(report)):
                    await self._database.write(store_refusal, report, error.message, ttl_ms=ttl_ms)
                raise
            self._wakeups.wake(await self._database.read(subject_names, changed_ids))
        if has_new_ids or (report.hosted and not renewed):
            self._request_comparison(report.broker_group)
        if report.untold:
            self._unannounced[report.broker_group] = report.untold
        is_group_missed, fence = False, 0
        if not renewed or report.opened_after:  # the broker may not have received a reply yet
            is_group_missed = await self._database.read(lacks_announced_groups, report.broker_group)
            fence = await self._database.read(read_accepted_fence, report.broker_group)
        return BrokerWelcome(
            heartbeat_ms=settings.broker_heartbeat_ms,
            ttl_ms=settings.broker_ttl_ms,
            groups_missed=is_group_missed,
            fence=fence,
            access=None if self._news is None else self._news(),
            cluster_version="" if self._member is None else self._member.version,
            history=self._history,
        )

    async def _note_history(self, known: int = 0) -> None:
        """Compare the database with what is known of its history, and remember what it says now.
        Raises StorageError.
        """
        known = max(known, self._history)
        history = await self._database.read(read_history)
        if needs_note(history, known):
            fall_back = await self._database.write_urgent(note_history, known)
            if fall_back is not None:
                for broker_group in fall_back.broker_groups:
                    self._log_quarantine(broker_group, fall_back.reason)
        if max(known, history.changes) > self._history:
            self._history = max(known, history.changes)
            if self._told_history is not None:
                await self._told_history.store(self._history)

    def _log_quarantine(self, broker_group: str, reason: str) -> None:
        """Log the beginning or the end of a quarantine, once."""
        if bool(reason) == (broker_group in self._quarantined):
            return
        if reason:
            self._quarantined.add(broker_group)
            log.error(
                "the database is older than what brokers know: no copy of broker group %s takes "
                "the place of its broker until that has said which copies count: %s",
                broker_group,
                reason,
            )
        else:
            self._quarantined.discard(broker_group)
            log.warning("it is known again which copies of broker group %s count", broker_group)

    @property
    def has_unannounced_groups(self) -> bool:
        """True if a broker has reported partitions without knowing their consumer groups."""
        return bool(self._unannounced)

    def pop_unannounced(self) -> list[tuple[int, ...]]:
        """Return and clear the ids of the partitions whose consumer groups were never announced, as
        one tuple per broker.
        """
        unannounced, self._unannounced = self._unannounced, {}
        return list(unannounced.values())

    async def _check_no_copy(self, report: BrokerHeartbeat) -> None:
        """
        Check that a broker with a new address does not run on a copy of a data folder that is still
        in use at the old address.

        Raises:
            FolderRefusedError: a broker that has opened the data folder separately responds at the
                old address.
        """
        known_broker = await self._database.read(find_broker, report.broker_group)
        if (
            known_broker is None
            or known_broker.broker_id != report.broker_id
            or known_broker.address == report.address
        ):
            return
        if known_broker.opening in report.opened_after:
            copies = await self.read_copies(report.broker_group)
            if copies.promoted == known_broker.opening:
                return  # it was given the place, and the broker that had it may hang
        try:
            broker_id, opening = await self._fetch_identity(known_broker.address)
        except KeylaneError:
            return  # no reply: the broker has moved
        if opening and opening == report.opening:
            return  # the same broker under another name of its host
        if known_broker.opening not in ("", opening):
            return  # the broker there is refused itself: a copy was promoted
        if broker_id == report.broker_id:
            raise FolderRefusedError(
                Reason.FOLDER_IN_USE,
                f"the data folder of broker group {report.broker_group!r} is in use at "
                f"{known_broker.address} too: the one at {report.address} is a copy",
                broker_group=report.broker_group,
                address=known_broker.address,
            )

    async def _steps_back(self, report: BrokerHeartbeat) -> bool:
        """Return True if a refused broker needs no operator: another one of its folder serves, and
        it becomes a copy of that by itself.
        """
        known_broker = await self._database.read(find_broker, report.broker_group)
        return (
            report.steps_back
            and known_broker is not None
            and known_broker.broker_id == report.broker_id
            and known_broker.alive
            and known_broker.address != report.address
        )

    async def _is_outdated(self, report: BrokerHeartbeat) -> bool:
        """
        Return True if a refused report was sent before the broker moved, rather than by a second
        broker.

        This is the case if the report has the known data folder, and the reported opening does not
        respond at the reported address: nothing listens there, or another program, a broker of
        another data folder, or another opening of the same folder.
        """
        known_broker = await self._database.read(find_broker, report.broker_group)
        if known_broker is None or known_broker.broker_id != report.broker_id:
            return False
        if known_broker.alive and known_broker.address == report.address:
            return True  # only one broker can listen there, so an earlier opening sent the report
        try:
            broker_id, opening = await self._fetch_identity(report.address)
        except (NotSentError, InvalidRequestError):  # no broker listens there
            return True
        except KeylaneError:
            return False  # it does not respond, but may be running
        return (broker_id, opening or report.opening) != (report.broker_id, report.opening)

    async def _fetch_identity(self, address: str) -> tuple[str, str]:
        """
        Ask the broker at an address for the id of its data folder and for its opening.

        Raises:
            NotSentError, OutcomeUnknownError
            InvalidRequestError: another program listens there.
        """
        broker = BrokerClient(self._network, address, timeout_ms=PROBE_TIMEOUT_MS)
        details = (await broker.health()).details
        return str(details.get("broker_id", "")), str(details.get("opening", ""))

    async def accept_folder(self, broker_group: str, request: AcceptFolder) -> RefusedBroker:
        """
        Accept a data folder that was refused as an older copy.

        Raises:
            InvalidRequestError, NotFoundError
            NotSentError, OutcomeUnknownError: the copy's broker could not be asked for its
                partitions.
        """
        dry_run = replace(request, dry_run=True)
        copy = await self._database.write(accept_folder, broker_group, dry_run)
        hosted_partitions = await BrokerClient(self._network, copy.address).partitions()
        await self._database.read(check_folder_complete, broker_group, hosted_partitions.partitions)
        if request.dry_run:
            return copy
        accepted_copy = await self._database.write(
            accept_complete_folder, broker_group, request, hosted_partitions.partitions
        )
        log.warning(
            "broker group %s continues with the data folder at %s, whose log ends at %d; the last "
            "reported log ended at %d",
            broker_group,
            accepted_copy.address,
            accepted_copy.log_end,
            accepted_copy.known_log_end,
        )
        return accepted_copy

    async def read_copies(self, broker_group: str) -> CopySet:
        """Return the copies of a broker group that acks wait for. Raises NotFoundError."""
        return await self._database.read(read_copy_set, broker_group)

    async def change_copies(
        self, change: Callable[[Connection, str, T], CopySet], broker_group: str, request: T
    ) -> CopySet:
        """Call a function of `copy_sets` that changes the copies of a broker group. Raises its
        errors.
        """
        await self._note_history()
        stored = await self._database.write_urgent(change, broker_group, request)
        self._log_quarantine(broker_group, stored.quarantine)
        await self._note_history()
        return stored

    async def take_over(self, broker_group: str, request: TakeOver) -> CopySet:
        """
        Let a copy take the place of a broker that hands over to it or is gone: it has been silent
        for its ttl, or its machine refuses connections.

        Raises:
            NotFoundError, FolderRefusedError
            ConflictError: the broker serves, acks did not wait for the copy, or the copies are in
                quarantine.
        """
        await self._note_history()
        broker = await self._database.read(find_broker, broker_group)
        is_gone = False
        if broker is not None and broker.alive:
            is_offered = (await self.read_copies(broker_group)).handing_to == request.copy_id
            is_gone = not is_offered and await self._is_gone(broker.address)
        try:
            stored = await self._database.write_urgent(
                promote_copy,
                broker_group,
                PromoteCopy(
                    copy_id=request.copy_id, broker_id=request.broker_id, log_end=request.log_end
                ),
                gone_from=broker.address if is_gone and broker is not None else "",
                start_ms=TAKE_OVER_START_MS,
            )
        except (ConflictError, FolderRefusedError) as error:
            if error.reason is Reason.COPIES_QUARANTINED:
                self._log_quarantine(broker_group, error.message)
            elif error.reason is not Reason.BROKER_SERVES:
                self._refused_copies.note((broker_group, request.copy_id), error.message)
            raise
        await self._note_history()
        log.warning(
            "copy %s takes the place of the broker of group %s%s, in term %d",
            request.copy_id,
            broker_group,
            "" if broker is None else f" at {broker.address}",
            stored.term,
        )
        return stored

    def refused_copies(self, broker_group: str) -> dict[str, str]:
        """Return a dict that maps each copy that has lately asked this metaserver for the place of
        a broker in vain to the reason.
        """
        return {
            copy_id: problem
            for (group, copy_id), problem in self._refused_copies.items()
            if group == broker_group
        }

    async def hand_over(self, broker_group: str, request: HandOver) -> HandedOver:
        """
        Let the broker of a group hand over to a copy.

        Raises:
            NotFoundError: there is no such group, or no such copy.
            ConflictError: there is no copy that could take the place, or not this one.
            BusyError: the broker hands over already, or an operation changes its partitions.
            UnavailableError: the copy has not taken the place in time; the broker serves on.
            UnreachableError: the broker cannot be asked.
        """
        await self.read_copies(broker_group)
        await self._database.read(check_no_operation, broker_group)
        broker = await self._database.read(find_broker, broker_group)
        assert broker is not None
        return await BrokerClient(self._network, broker.address).control(
            endpoints.GIVE_PLACE, request
        )

    async def _is_gone(self, address: str) -> bool:
        """Return True if the machine of a broker says that no program listens at its address."""
        try:
            await BrokerClient(self._network, address, timeout_ms=LOOK_TIMEOUT_MS).health()
        except NotSentError as error:
            return error.is_refused
        except KeylaneError:
            pass
        return False

    async def cordon(self, broker_group: str, request: Cordon) -> BrokerView:
        """Cordon or uncordon a broker group. Raises InvalidRequestError, NotFoundError."""
        await self._database.write(cordon_broker, broker_group, request.cordoned)
        views = await self._database.read(broker_views)
        return next(view for view in views if view.broker_group == broker_group)

    # ── subjects ──────────────────────────────────────────────────────────────────────────────────
    async def create_subject(self, request: CreateSubject) -> SubjectView:
        """
        Create a subject and host its partitions. Repeating the call with the same settings has no
        effect.

        Raises:
            InvalidRequestError
            ConflictError: the subject exists with other settings, or a broker permanently refused
                its partitions, in which case the name can be used again.
            SubjectDeletedError: an earlier subject with this name is being deleted.
            UnavailableError: no broker is available, a broker did not host its partitions, in which
                case a retry continues the creation, or the database was lost.
            UnfinishedError: the creation takes longer than CREATION_WAIT_S. It continues, and a
                repeated call waits for it.
        """
        row = await self._database.write(
            plan_subject,
            request,
            subjects_max=self._settings.subjects_max,
            limited=self._settings.is_guarded,
        )
        if row.route_version == 0:
            await self.complete_creation(row)
        return await self.read_subject(row.name)

    async def auto_create(self, name: str, request: AutoCreate) -> SubjectView:
        """
        Create a subject for its first message, if the setting `auto_create` allows it.

        Raises:
            InvalidRequestError
            SubjectUnknownError: `auto_create` does not allow it, or an operator is creating it.
            SubjectDeletedError: an earlier subject with this name was deleted or is being deleted;
                programs that still send to it must not create it again.
            KeylaneError: any error of `create_subject`.
        """
        try:
            return await self.read_subject(name)
        except SubjectUnknownError:
            if await self._was_deleted(name) or not self._settings.creates(name):
                raise
        partitions = self._settings.auto_create_partitions
        create = CreateSubject(
            subject=name, partitions=partitions, order_strategy=request.order_strategy
        )
        try:
            view = await self.create_subject(create)
        except ConflictError as error:
            if error.reason is not Reason.SUBJECT_EXISTS:
                raise
            # Another call is creating it with other settings.
            row = await self._database.read(find_subject, name)
            if row is not None:
                await self.complete_creation(row)
            return await self.read_subject(name)
        log.info("subject %s was created by its first message", name)
        return view

    async def _was_deleted(self, name: str) -> bool:
        """Call `check_not_deleted`. The record of the deletion is kept as long as programs keep
        requesting the subject.
        """
        try:
            return await self._database.read(check_not_deleted, name)
        except SubjectDeletedError:
            if await self._database.read(deletion_expires, name):
                await self._database.write(extend_deletion_record, name)
            raise

    async def continue_creations(self) -> None:
        """
        Continue interrupted creations. A failure of one does not affect the others.

        Raises:
            StorageError: the creations could not be read from the database.
        """
        for row in await self._database.read(planned_subjects):
            try:
                await self.complete_creation(row)
            except ConflictError as error:
                log.warning("%s", error.message)
            except KeylaneError as error:
                log.debug("%s", error.message)

    async def complete_creation(self, row: SubjectRow) -> None:
        """
        Host all planned partitions and open the subject. Partitions of silent brokers move to other
        brokers, except those of a hidden subject.

        Calls for the same subject share one task, which continues even if they are cancelled.

        Raises:
            UnavailableError: a broker did not host its partitions, and no other is available.
            ConflictError: a broker permanently refused its partitions.
            UnfinishedError: the creation takes longer than CREATION_WAIT_S.
        """
        creation = self._creations.get(row.subject_id)
        if creation is None:
            creation = self._creations[row.subject_id] = _Creation()
            creation.task = asyncio.create_task(self._run_creation(row, creation.hosted))
            creation.task.add_done_callback(partial(self._finish_creation, row.subject_id))
        assert creation.task is not None
        finished, _ = await asyncio.wait([creation.task], timeout=CREATION_WAIT_S)
        if finished:
            creation.task.result()
            return
        planned_count = len(await self._database.read(planned_partitions, row.subject_id))
        hosted_count = len(creation.hosted)
        raise UnfinishedError(
            Reason.CREATION_UNFINISHED,
            f"{row.name!r} is being created: {hosted_count} of "
            f"{counted(planned_count, 'partition')} have their broker",
            subject=row.name,
            partitions=planned_count,
            partitions_hosted=hosted_count,
        )

    def _finish_creation(self, subject_id: int, task: asyncio.Task[None]) -> None:
        """Remove a finished creation and mark its error as retrieved."""
        del self._creations[subject_id]
        if not task.cancelled():
            task.exception()  # raised by the waiting calls

    async def _run_creation(self, row: SubjectRow, hosted_ids: set[int]) -> None:
        """Complete a creation without a timeout. Adds the ids of hosted partitions to
        `hosted_ids`.
        """
        problem = ""
        for _ in range(PLANS_MAX):
            partitions = await self._database.read(planned_partitions, row.subject_id)
            if not partitions:
                return  # another metaserver has opened it
            problem = await self._host_partitions(row, partitions, hosted_ids)
            if not problem:
                planned_ids = [partition.partition_id for partition in partitions]
                if await self._database.write(open_subject, row.name, planned_ids):
                    self._wakeups.wake([row.name])
                    return
            elif not await self._database.write(replan_creation, row.subject_id):
                break
        raise UnavailableError(
            Reason.NOT_ENOUGH_BROKERS,
            f"{problem or 'its plan has changed meanwhile'}; the creation continues automatically "
            "when the broker can host the partition, or on another broker once this one is silent",
            subject=row.name,
        )

    async def _host_partitions(
        self, row: SubjectRow, partitions: Sequence[Partition], hosted_ids: set[int]
    ) -> str:
        """
        Ask brokers to host partitions. Return the reason why some are not hosted, or "".

        Raises:
            ConflictError: a broker permanently refused its partitions.
        """
        errors_of_used_ids: dict[int, str] = {}
        cluster_id = await self._database.read(read_cluster_id)
        slots = asyncio.Semaphore(HOSTED_AT_ONCE_MAX)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._host_partition(
                        row, partition, cluster_id, slots, errors_of_used_ids, hosted_ids
                    )
                )
                for partition in partitions
            ]
        if errors_of_used_ids:
            await self._fail_creation(row, errors_of_used_ids)
        problems = [task.result() for task in tasks if task.result()]
        if not problems:
            return ""
        count_text = f"{len(problems)} of {counted(len(partitions), 'partition')} of {row.name!r}"
        return f"{count_text} have no broker yet: {problems[0]}"

    async def _fail_creation(self, row: SubjectRow, in_use: Mapping[int, str]) -> None:
        """Mark a creation as failed because its partition ids are in use, unless the subject is
        already open. Raises ConflictError.
        """
        problem = (
            f"the creation of {row.name!r} failed: {next(iter(in_use.values()))}; the id was "
            "issued earlier, by a newer database or by a different one"
        )
        if await self._database.write(fail_creation, row.subject_id, problem, in_use=set(in_use)):
            raise ConflictError(Reason.CREATION_FAILED, problem, subject=row.name)

    async def _host_partition(
        self,
        row: SubjectRow,
        partition: Partition,
        cluster_id: str,
        slots: asyncio.Semaphore,
        in_use: dict[int, str],
        hosted_ids: set[int],
    ) -> str | None:
        """
        Ask a broker to host a partition. Return the reason why the request must be retried, or
        None.

        Args:
            in_use: if the broker permanently refuses because the partition id is in use, the reason
                is added here under that id.
            hosted_ids: the partition id is added here if the broker hosts it.
        """
        if partition.address is None:
            return f"broker group {partition.broker_group!r} is silent"
        # Brokers do not know the state PLANNED: they host the partition as OPEN.
        body = HostPartition(
            subject=row.hosted_name,
            partition=replace(partition, state=PartitionState.OPEN),
            order_strategy=row.order_strategy,
            partitions_wanted=row.partitions_wanted,
            retention=row.retention,
            static=row.static,
            # There are no groups before the subject is open. A target's groups are announced when
            # the subject is published.
            groups=None if row.hidden_for else (),
            message_bytes_max=hosted_limit(row.message_bytes_max),
            hidden=row.name if row.hidden_for else "",
            cluster_id=cluster_id,
        )
        async with slots:
            try:
                await BrokerClient(self._network, partition.address).control(
                    endpoints.HOST_PARTITION, body
                )
            except InvalidRequestError as error:
                if error.reason is not Reason.PARTITION_IN_USE:
                    return f"broker group {partition.broker_group!r}: {error.message}"
                in_use[partition.partition_id] = (
                    f"broker group {partition.broker_group!r}: {error.message}"
                )
            except KeylaneError as error:
                return f"broker group {partition.broker_group!r}: {error.message}"
            else:
                hosted_ids.add(partition.partition_id)
        return None

    async def list_subjects(self) -> SubjectList:
        """Return all open subjects, by name."""
        return SubjectList(
            subjects=await self._database.read(
                subject_summaries, hidden_expires_ms=self._settings.hidden_expires_ms
            )
        )

    async def read_subject(self, name: str) -> SubjectView:
        """Return one subject with its route. Raises SubjectUnknownError."""
        return await self._database.read(read_subject, name)

    def trust_database(self) -> None:
        """Assume that an empty database was not lost, so that lookups of unknown subjects fail
        immediately, even right after a start.
        """
        self._retry_until_s = 0.0

    async def retry_while_empty(self, call: Callable[[], Awaitable[T]]) -> T:
        """
        Return the result of `call`. If the subject is unknown and the database is empty right after
        a start, wait and call it once more.

        Only the reports of brokers show whether an empty database was lost, and they have not
        arrived yet right after a start. Clients give up if a subject is unknown, but keep waiting
        if the database was lost.
        """
        try:
            return await call()
        except SubjectUnknownError:
            loop = asyncio.get_running_loop()
            if self._retry_until_s is None:
                settings = self._settings
                heartbeat_ms = settings.broker_heartbeat_ms
                silence_ms = max(heartbeat_ms, quiet_limit_ms(settings.broker_ttl_ms))
                wait_ms = max(REPORTS_MS_MIN, silence_ms + heartbeat_ms)
                self._retry_until_s = loop.time() + wait_ms / 1000
            remaining_s = self._retry_until_s - loop.time()
            if remaining_s <= 0 or not await self._database.read(is_empty):
                raise
        await asyncio.sleep(remaining_s)
        return await call()

    # ── routes ────────────────────────────────────────────────────────────────────────────────────
    async def wait_for_route(
        self,
        name: str,
        *,
        known_version: int = -1,
        wait_ms: int = 0,
        order_strategy: OrderStrategy | None = None,
        subject_id: int = 0,
    ) -> Route:
        """
        Return the route as soon as it is newer than `known_version`, or after `wait_ms`.

        Args:
            subject_id: the id of the subject that the caller knows by this name, or 0.

        Raises:
            InvalidRequestError, SubjectUnknownError, SubjectDeletedError, ConflictError
        """

        async def read() -> Route:
            return await self._database.read(
                read_route, name, order_strategy=order_strategy, subject_id=subject_id
            )

        with self._wakeups.listen(Subject(name)) as waiter:
            route = await read()
            if route.version > known_version or not wait_ms:
                return route
            if self._versions.setdefault(name, route.version) > route.version:
                # Another metaserver has changed the route since it was read, or a subject was
                # created with the name of a deleted one, so that its versions start again.
                route = await read()
                if route.version > known_version:
                    return route
                self._versions[name] = route.version
            await waiter.wait(wait_ms)
            if not waiter.woken:
                return route
        return await read()

    async def check_for_changes(self) -> None:
        """Wake the calls waiting for routes that another metaserver has changed. Raises
        StorageError.
        """
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

    def wake_route_waiters(self, names: Iterable[Subject]) -> None:
        """Wake the calls waiting for the routes of these subjects."""
        self._wakeups.wake(names)

    def close(self) -> None:
        """Reply to all waiting calls and cancel the running creations, which are continued by
        another metaserver, or by this one after its next start.
        """
        self._wakeups.wake_all()
        for creation in self._creations.values():
            if creation.task is not None:
                creation.task.cancel()


def _renew_unless_changed(
    connection: Connection, report: BrokerHeartbeat, *, ttl_ms: int
) -> tuple[bool, bool]:
    """Renew a broker. Return whether that was enough, so that the full report need not be stored,
    and whether the broker has a partition with a higher id than any in the database.
    """
    renewed = renew_broker(connection, report, ttl_ms=ttl_ms)
    return renewed, has_higher_id(connection, report.highest_id)
