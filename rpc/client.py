"""Clients of a metaserver and of a broker: one method for each endpoint, and a data channel that reopens by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from ..protocol import endpoints
from ..protocol.access.capability import AccessNews
from ..protocol.control import (
    AcceptFolder,
    AutoCreate,
    BrokerHeartbeat,
    BrokerView,
    BrokerWelcome,
    CreateSubject,
    DeleteGroup,
    DeleteSubject,
    Done,
    DropPartition,
    FoundOffset,
    Grants,
    GroupDeletion,
    GroupList,
    GroupView,
    Health,
    Heartbeat,
    HostPartition,
    Join,
    Joined,
    Leave,
    PartitionStatus,
    PartitionStatusList,
    RefusedBroker,
    ReleaseGrant,
    SubjectDeletion,
    SubjectList,
    SubjectView,
    Suspend,
    SwitchGroup,
    TimeBound,
)
from ..protocol.errors import CreationUnfinishedError, SubjectUnknownError, UnreachableError
from ..protocol.frames import (
    Answer,
    CancelScheduled,
    ListParked,
    Read,
    ReadEdited,
    ReadParked,
    Request,
    is_long_poll,
)
from ..protocol.groups import CreateGroup, GroupSettings, SetGroup, SuspendGroup
from ..protocol.http.access import ACCESS_NEWS
from ..protocol.http.at_once import HeartbeatAnswers, Heartbeats
from ..protocol.http.endpoint import Endpoint
from ..protocol.limits import PULLS_AT_ONCE_MAX
from ..protocol.operations import (
    Cordon,
    HideSubject,
    OperationList,
    OperationView,
    Publication,
    PublishSubject,
    Reshape,
    SetSubject,
    SubjectHistory,
)
from ..protocol.parked import ChangeParkedKey, ParkedList, ParkedOffsets
from ..protocol.progress import (
    CanceledReset,
    ForgetGroup,
    ForgottenGroup,
    GroupReset,
    KnowGroups,
    ResetGroup,
    SetCursor,
    TellGroups,
    ToldGroups,
)
from ..protocol.queues import QueueList
from ..protocol.reading.bounds import AskBounds, BoundsList
from ..protocol.reprocess.holds import Held, SetHold
from ..protocol.routing import OrderStrategy, Route
from ..protocol.scheduled.receipt import CanceledScheduled, ScheduledPage
from ..protocol.verification import Verification
from .liveness.asking_again import Asking
from .metaservers import CALL_TIMEOUT_MS, Metaservers, of_program
from .network import Channel, Network

T = TypeVar("T")
CREATION_PAUSE_S = 0.2
CREATION_STALLED_S = 60.0
"""For how long a creation is waited for of which no further partition gets its broker."""
REPEATABLE = frozenset({CancelScheduled, ListParked, Read, ReadEdited, ReadParked})
"""Frames that change nothing when they come twice, and that no loop of a client repeats by itself."""
PULL_TURN_MS = 500
"""How long a pull waits at a broker while other pulls of this client wait for their turn."""


async def _created(ask: Callable[[], Awaitable[T]]) -> T:
    """
    Ask until a subject is created.

    Raises:
        CreationUnfinishedError: no broker has taken a partition of it for CREATION_STALLED_S; the metaserver goes on.
    """
    clock = asyncio.get_running_loop().time
    hosted, since = -1, clock()
    while True:
        try:
            return await ask()
        except CreationUnfinishedError as error:
            if (error.partitions_hosted or 0) > hosted:
                hosted, since = error.partitions_hosted or 0, clock()
            elif clock() >= since + CREATION_STALLED_S:
                raise
        await asyncio.sleep(CREATION_PAUSE_S)


class MetaClient(Metaservers):
    """Calls to one of several metaservers; see `Metaservers` for which is asked."""

    async def broker_heartbeat(
        self, body: BrokerHeartbeat, *, within_ms: int | None = None
    ) -> BrokerWelcome:
        """
        Report a broker.

        Args:
            within_ms: the time for all metaservers together, if each of them hangs.
        """
        timeout_ms = self._timeout_ms
        if within_ms is not None:
            timeout_ms = min(timeout_ms, max(1, within_ms // len(self._addresses)))
        return await self._call(endpoints.BROKER_HEARTBEAT, body, timeout_ms=timeout_ms)

    async def access_news(self) -> AccessNews:
        """What a broker has to know to judge capabilities."""
        return await self._call(ACCESS_NEWS)

    async def access(
        self,
        endpoint: Endpoint[T],
        body: object = None,
        *,
        query: dict[str, str] | None = None,
        **names: int,
    ) -> T:
        """A call about access."""
        return await self._call(
            endpoint, body, query=query, wait_ms=0, timeout_ms=15_000, one_address=False, **names
        )

    async def create_subject(self, body: CreateSubject) -> SubjectView:
        """Create a subject, and wait for its partitions; again with the same settings changes nothing."""
        return await _created(
            partial(self._call, endpoints.CREATE_SUBJECT, body, timeout_ms=15_000)
        )

    async def subjects(self) -> SubjectList:
        """All subjects."""
        return await self._call(endpoints.SUBJECTS)

    async def subject(self, subject: str) -> SubjectView:
        """One subject."""
        return await self._call(endpoints.SUBJECT, subject=subject)

    async def delete_subject(self, subject: str, body: DeleteSubject) -> SubjectDeletion:
        """Delete a subject, or ask how far its deletion is."""
        return await self._call(endpoints.DELETE_SUBJECT, body, timeout_ms=15_000, subject=subject)

    async def delete_group(self, subject: str, group: str, body: DeleteGroup) -> GroupDeletion:
        """Delete a consumer group, or ask how far its deletion is."""
        return await self._call(
            endpoints.DELETE_GROUP, body, timeout_ms=15_000, subject=subject, group=group
        )

    async def create_group(self, subject: str, group: str, body: CreateGroup) -> GroupSettings:
        """Make a consumer group, and fix where it begins."""
        return await self._call(
            endpoints.CREATE_GROUP, body, timeout_ms=15_000, subject=subject, group=group
        )

    async def group_settings(self, subject: str, group: str) -> GroupSettings:
        """What is stored of a consumer group."""
        return await self._call(endpoints.GROUP_SETTINGS, subject=subject, group=group)

    async def set_group(self, subject: str, group: str, body: SetGroup) -> GroupSettings:
        """Change the stored failure policy of a consumer group."""
        return await self._call(endpoints.SET_GROUP, body, subject=subject, group=group)

    async def suspend_group(self, subject: str, group: str, body: SuspendGroup) -> GroupSettings:
        """Suspend or resume a consumer group, or one client of it."""
        return await self._call(endpoints.SUSPEND_GROUP, body, subject=subject, group=group)

    async def queues(self, subject: str) -> QueueList:
        """The logic queues of a static subject."""
        return await self._call(endpoints.QUEUES, subject=subject)

    async def reshape(self, body: Reshape) -> OperationList:
        """Begin to change partitions, or plan it.  The operations then run by themselves."""
        return await self._call(endpoints.RESHAPE, body, timeout_ms=15_000)

    async def set_subject(self, subject: str, body: SetSubject) -> OperationList:
        """Begin to change settings of a subject, or plan it."""
        return await self._call(endpoints.SET_SUBJECT, body, timeout_ms=15_000, subject=subject)

    async def hide_subject(self, subject: str, body: HideSubject) -> SubjectView:
        """As `create_subject`, of a hidden one."""
        return await _created(
            partial(self._call, endpoints.HIDE_SUBJECT, body, timeout_ms=15_000, subject=subject)
        )

    async def publish_subject(self, hidden: str, body: PublishSubject) -> Publication:
        """Publish a hidden subject, or ask how far it is."""
        return await self._call(endpoints.PUBLISH_SUBJECT, body, timeout_ms=15_000, subject=hidden)

    async def cancel_operation(self, operation_id: int) -> OperationView:
        """Undo an operation of which nothing is sealed yet."""
        return await self._call(endpoints.CANCEL_OPERATION, id=operation_id)

    async def cordon(self, broker_group: str, body: Cordon) -> BrokerView:
        """Keep a broker group from new partitions, or let it have some again."""
        return await self._call(endpoints.CORDON, body, group=broker_group)

    async def accept_folder(self, broker_group: str, body: AcceptFolder) -> RefusedBroker:
        """Accept a copy of a data folder that is refused because it is behind."""
        return await self._call(endpoints.ACCEPT_FOLDER, body, group=broker_group)

    async def operations(self, subject: str) -> OperationList:
        """The operations of a subject, the newest first."""
        return await self._call(endpoints.OPERATIONS, subject=subject)

    async def history(self, subject: str) -> SubjectHistory:
        """Every partition a subject ever had."""
        return await self._call(endpoints.HISTORY, subject=subject)

    async def verify(self) -> Verification:
        """Checks between the metaserver's database and the brokers."""
        return await self._call(endpoints.VERIFY, timeout_ms=60_000)

    async def route(
        self,
        subject: str,
        *,
        known_version: int = -1,
        wait_ms: int = 0,
        order_strategy: OrderStrategy | None = None,
        subject_id: int = 0,
    ) -> Route:
        """
        The route; waits up to `wait_ms` for a version above `known_version`.

        Args:
            order_strategy: checked if given.
            subject_id: of the route that is known; another subject of this name is refused, if this one was deleted.
        """
        query = {"known_version": str(known_version), "wait_ms": str(wait_ms)}
        if subject_id:
            query["subject_id"] = str(subject_id)
        if order_strategy is not None:
            query["order_strategy"] = order_strategy.value
        return await self._call(endpoints.ROUTE, query=query, wait_ms=wait_ms, subject=subject)

    async def route_to_send(
        self,
        subject: str,
        *,
        wait_ms: int = 0,
        order_strategy: OrderStrategy | None = None,
        subject_id: int = 0,
    ) -> Route:
        """As `route`, for a sender: a subject that it has not known is created, where the metaserver allows it."""
        ask = partial(self.route, subject, order_strategy=order_strategy, subject_id=subject_id)
        try:
            return await ask(wait_ms=wait_ms)
        except SubjectUnknownError:
            if subject_id:
                raise
            body = AutoCreate(order_strategy=order_strategy or OrderStrategy.STRICT)
            await self._call(endpoints.AUTO_CREATE, body, subject=subject, timeout_ms=15_000)
            return await ask()

    async def join(self, body: Join) -> Joined:
        """Begin a consumer session."""
        return await self._call(endpoints.JOIN, body)

    async def heartbeat(self, body: Heartbeat, *, timeout_ms: int | None = None) -> Grants:
        """
        Renew a consumer session; returns at once when its grants changed.

        Only one address is asked: the caller knows how much time is left for the next, and what to ask it.

        Args:
            timeout_ms: beyond the `wait_ms` of the heartbeat.
        """
        return await self._call(
            endpoints.HEARTBEAT, body, wait_ms=body.wait_ms, timeout_ms=timeout_ms, one_address=True
        )

    async def heartbeats(
        self, body: Heartbeats, *, wait_ms: int, timeout_ms: int
    ) -> HeartbeatAnswers:
        """As `heartbeat` of several sessions; the metaserver waits for `wait_ms`."""
        return await self._call(
            endpoints.HEARTBEATS, body, wait_ms=wait_ms, timeout_ms=timeout_ms, one_address=True
        )

    async def release(self, body: ReleaseGrant, *, timeout_ms: int | None = None) -> Done:
        """Report the end of a hand-over.  `timeout_ms` is of each metaserver, here and in the next two."""
        return await self._call(endpoints.RELEASE, body, timeout_ms=timeout_ms)

    async def suspend(self, body: Suspend, *, timeout_ms: int | None = None) -> Done:
        """Take back a session's partitions and grant it none, or let it take part again."""
        return await self._call(endpoints.SUSPEND, body, timeout_ms=timeout_ms)

    async def leave(self, body: Leave, *, timeout_ms: int | None = None) -> Done:
        """End a consumer session."""
        return await self._call(endpoints.LEAVE, body, timeout_ms=timeout_ms)

    async def group(self, subject: str, group: str) -> GroupView:
        """Owners of a consumer group."""
        return await self._call(endpoints.GROUP, subject=subject, group=group)

    async def groups(self, subject: str) -> GroupList:
        """Consumer groups of a subject."""
        return await self._call(endpoints.GROUPS, subject=subject)

    async def reset_group(self, subject: str, group: str, body: ResetGroup) -> GroupReset:
        """Set the progress of a consumer group that has no live consumers, or `live` of any."""
        return await self._call(
            endpoints.RESET_GROUP, body, timeout_ms=30_000, subject=subject, group=group
        )

    async def cancel_reset(self, subject: str, group: str) -> CanceledReset:
        """Cancel a reset that waits for live consumers."""
        return await self._call(endpoints.CANCEL_RESET, subject=subject, group=group)

    async def switch_group(self, subject: str, group: str, body: SwitchGroup) -> GroupView:
        """Change the consume strategy of a group."""
        return await self._call(endpoints.SWITCH_GROUP, body, subject=subject, group=group)

    async def health(self) -> Health:
        """
        Ask whether a metaserver is ready.

        Raises:
            InvalidRequestError: the address is another program's.
        """
        health = await self._call(endpoints.HEALTH)
        return of_program("metaserver", self._addresses[0], health)


class BrokerClient:
    """
    Calls to one broker; its channel opens with the first data call, and again after it broke.

    Args:
        on_opening: called before a channel is opened.
    """

    def __init__(
        self,
        network: Network,
        address: str,
        *,
        timeout_ms: int = CALL_TIMEOUT_MS,
        on_opening: Callable[[BrokerClient], object] = lambda _client: None,
    ) -> None:
        self.address = address
        self._network = network
        self._timeout_ms = timeout_ms
        self._on_opening = on_opening
        self._asking = Asking(network)
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._queued = 0
        """Calls that wait for the lock, or have it."""
        self._pulls = asyncio.Semaphore(PULLS_AT_ONCE_MAX)

    @property
    def is_idle(self) -> bool:
        """True if there is no open channel, and no call waits for one."""
        return not self._queued and (self._channel is None or self._channel.closed)

    @property
    def live_channel(self) -> Channel | None:
        """The channel, if it is open and no call waits for one; None: `channel` gives one."""
        channel = self._channel
        return None if channel is None or channel.closed or self._queued else channel

    async def channel(self) -> Channel:
        """The open channel.  Raises NotSentError."""
        if (live := self.live_channel) is not None:
            return live
        # While others wait, the lock is taken for an open channel too, so that no call overtakes theirs.
        self._queued += 1
        try:
            async with self._opening:
                if self._channel is None or self._channel.closed:
                    self._channel = None  # one that has ended keeps buffers of its connection
                    self._on_opening(self)
                    opening = self._network.open_channel(self.address, timeout_ms=self._timeout_ms)
                    self._channel = await opening
                return self._channel
        finally:
            self._queued -= 1

    async def call(
        self, request: Request, payload: bytes = b"", *, wait_ms: int = 0
    ) -> tuple[Answer, memoryview]:
        """One data call.  Pulls, and reads that wait, over `PULLS_AT_ONCE_MAX` wait here, and each then has `PULL_TURN_MS` at the broker, in turn."""
        if not is_long_poll(request):
            return await self._call(request, payload, wait_ms)
        async with self._pulls:
            if self._pulls.locked() and wait_ms > PULL_TURN_MS:
                wait_ms = PULL_TURN_MS
                request = replace(request, wait_ms=wait_ms)
            return await self._call(request, payload, wait_ms)

    async def _call(
        self, request: Request, payload: bytes, wait_ms: int
    ) -> tuple[Answer, memoryview]:
        kept = self.live_channel
        channel = await self.channel()
        timeout_ms = self._timeout_ms + wait_ms
        try:
            return await channel.call(request, payload, timeout_ms=timeout_ms)
        except UnreachableError:
            # A connection that was kept may be dead without a word, as when the broker's machine was restarted.
            if channel is not kept or not channel.closed or type(request) not in REPEATABLE:
                raise
        return await (await self.channel()).call(request, payload, timeout_ms=timeout_ms)

    async def host_partition(self, body: HostPartition) -> PartitionStatus:
        """Have the broker host a partition."""
        return await self._control(endpoints.HOST_PARTITION, body)

    async def partitions(self) -> PartitionStatusList:
        """All partitions that the broker hosts, asked for page by page."""
        all_pages = page = await self._control(endpoints.PARTITIONS)
        while page.more_after is not None:
            page = await self._control(endpoints.PARTITIONS, query={"after": str(page.more_after)})
            all_pages.partitions.extend(page.partitions)
        return replace(all_pages, more_after=None)

    async def partition(self, partition_id: int) -> PartitionStatus:
        """One partition with its groups."""
        return await self._control(endpoints.PARTITION, id=partition_id)

    async def offset_at(self, partition_id: int, at_ms: int, bound: TimeBound) -> FoundOffset:
        """The offset of the message stored around a time, None if there is none."""
        query = {"at_ms": str(at_ms), "bound": str(bound)}
        return await self._control(endpoints.OFFSET_AT, query=query, id=partition_id)

    async def bounds(self, body: AskBounds) -> BoundsList:
        """Where partitions begin and end, and where times and groups are in them; others than hosted ones are left out."""
        return await self._control(endpoints.PARTITION_BOUNDS, body)

    async def seal(self, partition_id: int, *, empty: bool = False) -> PartitionStatus:
        """
        Seal a partition: it takes no more messages, and `next_offset` is its end.

        Raises:
            PartitionInUseError: it should be `empty` and has messages; nothing was changed.
        """
        query = {"empty": "1"} if empty else None
        return await self._control(endpoints.SEAL, query=query, id=partition_id)

    async def set_cursor(self, partition_id: int, body: SetCursor) -> PartitionStatus:
        """Set a group's cursor under a new token; the answer has this group only."""
        return await self._control(endpoints.SET_CURSOR, body, id=partition_id)

    async def know_groups(self, partition_id: int, body: KnowGroups) -> Done:
        """Make retention wait for groups that have not read a partition yet."""
        return await self._control(endpoints.KNOW_GROUPS, body, id=partition_id)

    async def tell_groups(self, body: TellGroups) -> ToldGroups:
        """As `know_groups` of several partitions at once."""
        return await self._control(endpoints.TELL_GROUPS, body)

    async def forget_group(self, partition_id: int, body: ForgetGroup) -> ForgottenGroup:
        """Have a partition forget a deleted consumer group."""
        return await self._control(endpoints.FORGET_GROUP, body, id=partition_id)

    async def hold(self, partition_id: int, body: SetHold) -> Held:
        """Hold messages of a partition against retention, renew that, or end it."""
        return await self._control(endpoints.HOLD, body, id=partition_id)

    async def drop_partition(self, partition_id: int, body: DropPartition) -> Done:
        """Have the broker drop a partition of a deleted subject."""
        return await self._control(endpoints.DROP_PARTITION, body, id=partition_id)

    async def scheduled(self, *, subject: str | None, limit: int) -> ScheduledPage:
        """The next messages that the broker delivers, of all subjects or one."""
        query = {"limit": str(limit)} | ({} if subject is None else {"subject": subject})
        return await self._control(endpoints.SCHEDULED, query=query)

    async def cancel_scheduled(self, scheduled_id: str) -> CanceledScheduled:
        """Have a scheduled message never delivered.  Raises ScheduledUnknownError."""
        return await self._control(endpoints.CANCEL_SCHEDULED, id=scheduled_id)

    async def parked(
        self, partition_id: int, group: str, *, first: int = 0, retrying: bool = False
    ) -> ParkedList:
        """The keys that a group has parked on a partition, from the `first`th on; `retrying`: and what waits for retry."""
        query = {"group": group, "first": str(first), "count": "1000"}
        query |= {"retrying": "1"} if retrying else {}
        return await self._control(endpoints.PARKED, query=query, id=partition_id)

    async def parked_offsets(self, partition_id: int, group: str, **asked: str) -> ParkedOffsets:
        """Where parked messages of a key are, and how each failed that has no order; `asked` is as the endpoint says."""
        query = {"group": group, **asked}
        return await self._control(endpoints.PARKED_OFFSETS, query=query, id=partition_id)

    async def change_parked(self, partition_id: int, body: ChangeParkedKey) -> ParkedList:
        """Redrive a parked key, or skip messages of it.  Raises ParkedKeyUnknownError, ParkMovedError."""
        return await self._control(endpoints.CHANGE_PARKED, body, id=partition_id)

    async def health(self) -> Health:
        """
        Ask whether the broker is ready, and whether it takes writes.

        Raises:
            InvalidRequestError: the address is another program's.
        """
        health = await self._control(endpoints.HEALTH)
        return of_program("broker", self.address, health)

    async def _control(
        self,
        endpoint: Endpoint[T],
        body: object = None,
        *,
        query: dict[str, str] | None = None,
        **names: object,
    ) -> T:
        return await self._asking.ask(
            endpoint,
            self.address,
            endpoint.path_of(**names),
            body,
            query,
            timeout_ms=self._timeout_ms,
        )

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await self._channel.close()
