"""Answers control calls to a broker: host, describe and seal partitions, set cursors, and so on.

Also finds the bounds of partitions, which jobs use to plan their reads: the first offset and the
end offset, and the offsets that correspond to given times and consumer groups.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from ..protocol import endpoints
from ..protocol.clock import Clock
from ..protocol.control import (
    Done,
    DropPartition,
    FoundOffset,
    Health,
    HostPartition,
    PartitionStatus,
    PartitionStatusList,
    TimeBound,
)
from ..protocol.errors import (
    BrokerReadOnlyError,
    CorruptLogError,
    InvalidRequestError,
    KeylaneError,
    OverloadedError,
    WrongBrokerError,
)
from ..protocol.progress import (
    ForgetGroup,
    ForgottenGroup,
    RefusedPartition,
    RegisterGroups,
    RegisterGroupsBatch,
    RegisterGroupsResult,
    SetCursor,
)
from ..protocol.reading.bounds import AskBounds, BoundsList, BoundsOf, PartitionBounds
from ..protocol.reading.newest import NewestMessage
from ..protocol.reprocess.holds import Held, SetHold
from ..protocol.text import parse_number
from ..rpc.access.pacing import NOT_LIMITED, Limited
from ..rpc.operating.probes import probe_routes
from ..rpc.server import ControlRoute, Params, whole_number
from .answering.newest import find_newest
from .copies.placement import NOWHERE, Site
from .folder_ownership import (
    FolderOwnership,
    check_copied,
    check_folder_ownership,
    check_readable,
)
from .partition.damage import describe_damage
from .partition.park_views import decode_key
from .partition.partition import HostedPartition
from .store.group_changes import drop_partition, forget_group, register_groups_at, set_cursor
from .store.store import DURABLE, Store

SEARCHES_MAX = 5
"""How often the search for a time in the future is repeated because messages are stored in the
meantime.
"""


async def bounds_of(
    store: Store,
    partition: HostedPartition,
    request: BoundsOf,
    removed_from_ms: Callable[[int], int | None],
) -> PartitionBounds:
    """
    Return the bounds of a partition.

    The times are looked up first. Messages that are stored in the meantime can only widen the
    bounds, so they contain every offset that was found.

    Args:
        removed_from_ms: takes the time at which a message was stored, and returns the time from
            which retention may remove it.

    Raises:
        CorruptLogError: the index of the partition is damaged.
    """
    offsets = [await _first_at(store, partition, at_ms) for at_ms in request.at_ms]
    head = await store.first_unit(partition)
    end = partition.readable_offset
    groups = (partition.groups.get(group) for group in request.groups)
    return PartitionBounds(
        partition_id=partition.partition_id,
        first_offset=partition.first_offset,
        next_offset=end,
        first_at_ms=None if head is None else head.appended_at_ms,
        removed_from_ms=None if head is None else removed_from_ms(head.appended_at_ms),
        message_bytes=0 if head is None else -(-head.length // head.message_count),
        offsets_at=tuple(None if offset == end else offset for offset in offsets),
        cursors=tuple(
            None if group is None or not group.is_durable else group.durable_cursor
            for group in groups
        ),
    )


async def _first_at(store: Store, partition: HostedPartition, at_ms: int) -> int:
    """
    Return the offset of the first message stored at this time or later, or the end offset if there
    is none.

    If messages are stored during the search, it is repeated, because their times may be before or
    after `at_ms`.
    """
    for _ in range(SEARCHES_MAX):
        end = partition.readable_offset
        offset = await store.find_offset_at(partition, at_ms, TimeBound.LOWER)
        if offset is not None:
            return offset
        if partition.readable_offset == end:
            break
    return partition.readable_offset


LISTED_MAX = 500
"""The maximum number of partitions in an answer. More would block the event loop for too long."""
GROUPS_LISTED_MAX = 2_000
"""The number of consumer groups after which no further partition is added to an answer, for the
same reason.
"""


def no_quotas(_subject: str) -> Limited:
    """Return that no call waits for a quota."""
    return NOT_LIMITED


class BrokerControl:
    """Answers control calls from a store's state. `registration`, `retention`, `refusal` and
    `waits_for_copies` return the current problem, or "" if there is none; `limited` the quota that
    delays calls about a subject.
    """

    def __init__(
        self,
        store: Store,
        *,
        broker_group: str,
        broker_id: str,
        clock: Clock,
        registration: Callable[[], str],
        opening: str = "",
        folder_ownership: FolderOwnership | None = None,
        retention: Callable[[], str] = lambda: "",
        removed_from_ms: Callable[[int], int | None] = lambda _stored_ms: None,
        refusal: Callable[[], str] = lambda: "",
        scheduled: Callable[[], Mapping[str, object]] = dict,
        copies: Callable[[], Mapping[str, object]] = dict,
        site: Site = NOWHERE,
        waits_for_copies: Callable[[], str] = lambda: "",
        limited: Callable[[str], Limited] = no_quotas,
        metaservers: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._broker_group = broker_group
        self._broker_id = broker_id
        self._opening_name = opening
        self._folder_ownership = folder_ownership
        self._clock = clock
        self._registration = registration
        self._retention = retention
        self._removed_from_ms = removed_from_ms
        self._refusal = refusal
        self._scheduled = scheduled
        self._copies = copies
        self._site = site
        self._waits_for_copies = waits_for_copies
        self._limited = limited
        self._metaservers = metaservers
        self._hosted_ids: list[int] = []
        """The sorted ids of the hosted partitions, as of version `_hosted_ids_version` of the
        table.
        """
        self._hosted_ids_version = -1

    def routes(self) -> list[ControlRoute]:
        """Return a route for each endpoint of `endpoints.BROKER`."""
        return [
            ControlRoute(endpoints.HOST_PARTITION, self.host),
            ControlRoute(endpoints.PARTITIONS, self.list),
            ControlRoute(endpoints.PARTITION, self.describe),
            ControlRoute(endpoints.OFFSET_AT, self.find_offset),
            ControlRoute(endpoints.PARTITION_BOUNDS, self.bounds),
            ControlRoute(endpoints.NEWEST_MESSAGE, self.find_newest),
            ControlRoute(endpoints.SEAL, self.seal),
            ControlRoute(endpoints.SET_CURSOR, self.set_cursor),
            ControlRoute(endpoints.REGISTER_GROUPS, self.register_groups),
            ControlRoute(endpoints.REGISTER_GROUPS_BATCH, self.register_groups_batch),
            ControlRoute(endpoints.FORGET_GROUP, self.forget),
            ControlRoute(endpoints.HOLD, self.hold),
            ControlRoute(endpoints.DROP_PARTITION, self.drop),
            ControlRoute(endpoints.HEALTH, self.health),
            *probe_routes(self._check_ready),
        ]

    async def host(self, body: HostPartition, _params: Params) -> PartitionStatus:
        """Host a partition of this broker group, and return once this is durable. A repeated call
        succeeds while the partition is unused.
        """
        if body.partition.broker_group != self._broker_group:
            raise WrongBrokerError(
                f"partition {body.partition.partition_id} belongs to broker group "
                f"{body.partition.broker_group!r}, not to {self._broker_group!r}",
                broker_group=self._broker_group,
            )
        await check_folder_ownership(self._folder_ownership)
        partition, durable = self._store.host(body)
        partition.check_unused()
        if body.times_from_ms:
            durable = self._store.begin_times(partition, body.times_from_ms)
        if body.groups is not None:
            durable = register_groups_at(
                self._store, partition, body.groups, complete=True, tokens_above=body.tokens_above
            )
        await durable
        return partition.status(now_ms=self._clock.boot_ms())

    async def list(self, _body: object, params: Params) -> PartitionStatusList:
        """Return a page of the hosted partitions, sorted by id: at most `limit` partitions with ids
        above `after_id`, and fewer if they have many groups; with `?storing=1`, only those that
        have stored something lately.
        """
        await check_copied(self._folder_ownership)
        after_id = whole_number(params, "after", -1, low=-1)
        limit = whole_number(params, "limit", LISTED_MAX, low=1, high=LISTED_MAX)
        partitions = self._store.state.partitions
        if self._hosted_ids_version != partitions.version:
            self._hosted_ids = sorted(set(partitions.ids()) - self._store.state.hosting)
            self._hosted_ids_version = partitions.version
        now_ms = self._clock.boot_ms()
        ids = self._hosted_ids
        if params.get("storing"):
            ids = [each for each in self._store.rates.storing_ids() if each in partitions]
        start = bisect_right(ids, after_id)
        page: list[PartitionStatus] = []
        group_count = 0
        for partition_id in ids[start : start + limit]:
            status = partitions[partition_id].status(now_ms=now_ms)
            page.append(self._add_rate(status, now_ms))
            group_count += len(page[-1].groups)
            if group_count >= GROUPS_LISTED_MAX:
                break
        has_more = start + len(page) < len(ids)
        return PartitionStatusList(
            broker_group=self._broker_group,
            partitions=page,
            broker_id=self._broker_id,
            more_after=page[-1].partition_id if has_more else None,
            dropped=self._store.state.dropped.subjects if after_id < 0 else {},
            dropped_id=self._store.state.dropped.highest_id,
        )

    async def describe(self, _body: object, params: Params) -> PartitionStatus:
        """Return the status of a partition with all its groups, or with the requested one; with
        `?size=1`, also about how many bytes it stores.
        """
        await check_copied(self._folder_ownership)
        partition = self._store.state.partition(partition_id_of(params))
        stored_bytes = None
        if params.get("size"):
            with suppress(CorruptLogError):  # the damage has been reported
                stored_bytes = await self._store.stored_bytes(partition)
        now_ms = self._clock.boot_ms()
        status = partition.status(now_ms=now_ms, group=params.get("group"))
        limited = self._limited(status.subject)
        return replace(
            self._add_rate(status, now_ms),
            groups=tuple(
                replace(each, promised_ms=self._store.promise_left_ms(partition.groups[each.group]))
                for each in status.groups
            ),
            stored_bytes=stored_bytes,
            limited_by=limited.limit,
            limited_ms=limited.left_ms,
            limited_for_ms=limited.for_ms,
            unsealable=_seal_problem(self._store, partition),
            holds=self._store.holds.list_views(partition),
        )

    def _add_rate(self, status: PartitionStatus, now_ms: int) -> PartitionStatus:
        rate = self._store.rates.rate(status.partition_id, now_ms)
        return replace(status, messages_per_s=rate.messages_per_s, bytes_per_s=rate.bytes_per_s)

    async def find_offset(self, _body: object, params: Params) -> FoundOffset:
        """Return the offset of the first message stored at or after a time (lower bound), or after
        it (upper bound).
        """
        partition = self._store.state.partition(partition_id_of(params))
        text, bound = params.get("at_ms", ""), params.get("bound", TimeBound.LOWER)
        if bound not in set(TimeBound):
            raise InvalidRequestError(f"bound must be lower or upper, not {bound[:40]!r}")
        at_ms = parse_number(text)
        if at_ms is None or len(text) > 18:
            raise InvalidRequestError(f"at_ms must be milliseconds since 1970, not {text[:40]!r}")
        await check_readable(self._folder_ownership)
        offset = await self._store.find_offset_at(partition, at_ms, TimeBound(bound))
        return FoundOffset(
            offset=offset,
            first_offset=partition.first_offset,
            next_offset=partition.readable_offset,
        )

    async def bounds(self, body: AskBounds, _params: Params) -> BoundsList:
        """Return the bounds of partitions, and the offsets that correspond to times and groups.
        Partitions that are not hosted are omitted.
        """
        await check_readable(self._folder_ownership)
        return BoundsList(
            broker_group=self._broker_group,
            partitions=[
                await bounds_of(self._store, partition, asked, self._removed_from_ms)
                for asked in body.partitions
                if (partition := self._store.state.partitions.get(asked.partition_id)) is not None
            ],
        )

    async def find_newest(self, _body: object, params: Params) -> NewestMessage:
        """Return the newest message of a partition, or of one of its order keys."""
        partition = self._store.state.partition(partition_id_of(params))
        key = decode_key(params.get("key"))
        await check_copied(self._folder_ownership)
        return await find_newest(
            self._store,
            partition,
            key,
            params.get("group", ""),
            wall_ms=self._clock.wall_ms(),
        )

    async def seal(self, _body: object, params: Params) -> PartitionStatus:
        """
        Seal a partition, durably. Repeating the call has no effect.

        With `?empty=1`, the call is refused if the partition has messages, because it is then not
        the one that the caller has hosted.
        """
        await check_folder_ownership(self._folder_ownership)
        partition_id = partition_id_of(params)
        if params.get("empty"):
            self._store.state.partition(partition_id).check_empty()
        partition, durable = self._store.seal(partition_id)
        await durable
        ended_ms = max(partition.appended_at_ms, self._clock.wall_ms())
        return replace(partition.status(now_ms=self._clock.boot_ms()), ended_at_ms=ended_ms)

    async def set_cursor(self, body: SetCursor, params: Params) -> PartitionStatus:
        """Set a group's cursor under a new token, durably, and return the status with only that
        group.
        """
        await check_folder_ownership(self._folder_ownership)
        partition = self._store.state.partition(partition_id_of(params))
        await set_cursor(self._store, partition, body)
        return partition.status(now_ms=self._clock.boot_ms(), group=body.group)

    async def register_groups(self, body: RegisterGroups, params: Params) -> Done:
        """Register groups that have not read the partition yet, durably. From then on, retention
        keeps messages for them.
        """
        await check_folder_ownership(self._folder_ownership)
        await self._register(partition_id_of(params), body)
        return Done()

    async def register_groups_batch(
        self, body: RegisterGroupsBatch, _params: Params
    ) -> RegisterGroupsResult:
        """Register groups, as `register_groups` does, on several partitions in one commit. The
        partitions that were refused are in the answer.
        """
        await check_folder_ownership(self._folder_ownership)
        outcomes: dict[int, BaseException | None] = {}
        durable: dict[int, asyncio.Future[None]] = {}
        for each in body.partitions:
            try:
                durable[each.partition_id] = self._register(each.partition_id, each.registration)
            except KeylaneError as error:
                outcomes[each.partition_id] = error
        results = await asyncio.gather(*durable.values(), return_exceptions=True)
        outcomes |= zip(durable, results, strict=True)
        refused_partitions = []
        for partition_id, failure in outcomes.items():
            if isinstance(failure, KeylaneError):
                refused_partitions.append(
                    RefusedPartition(partition_id=partition_id, reason=failure.message)
                )
            elif failure is not None:
                raise failure
        return RegisterGroupsResult(refused_partitions=tuple(refused_partitions))

    def _register(self, partition_id: int, registration: RegisterGroups) -> asyncio.Future[None]:
        """Register groups with `register_groups_at`, or raise PartitionUnknownError."""
        return register_groups_at(
            self._store,
            self._store.state.partition(partition_id),
            registration.groups,
            complete=registration.complete,
            tokens_above=registration.tokens_above,
        )

    async def forget(self, body: ForgetGroup, params: Params) -> ForgottenGroup:
        """Forget a deleted consumer group on a partition, durably. Repeating the call has no
        effect.
        """
        await check_folder_ownership(self._folder_ownership)
        partition = self._store.state.partition(partition_id_of(params))
        token, durable = forget_group(self._store, partition, body)
        await durable
        return ForgottenGroup(token=token)

    async def hold(self, body: SetHold, params: Params) -> Held:
        """Set, renew or end a job's hold, durably."""
        await check_folder_ownership(self._folder_ownership)
        partition = self._store.state.partition(partition_id_of(params))
        await self._store.holds.apply_request(partition, body)
        return self._store.holds.build_reply(partition)

    async def drop(self, body: DropPartition, params: Params) -> Done:
        """Drop a partition of a deleted subject, durably. Repeating the call has no effect."""
        await check_folder_ownership(self._folder_ownership)
        await drop_partition(
            self._store, partition_id_of(params), body, now_ms=self._clock.boot_ms()
        )
        return Done()

    async def _check_ready(self) -> Health:
        """Return whether the broker is ready for clients: `health` must be good, and a metaserver
        must have accepted the broker.
        """
        health = await self.health(None, {})
        problem = self._registration()
        if health.ready and problem:
            return replace(health, ready=False, reason=f"not registered: {problem}")
        return health

    async def health(self, _body: object, _params: Params) -> Health:
        """Return the broker's health. A broker is ready if it accepts writes and is not refused by
        the metaserver.
        """
        read_only = self._store.commit.refusal_reason
        refusal = self._refusal()
        waits = self._waits_for_copies()
        reason = (
            read_only or waits or (refusal and f"the metaserver refuses this broker: {refusal}")
        )
        snapshot_problem = self._store.snapshotter.problem
        return Health(
            program="broker",
            ready=not reason,
            reason=reason
            or (snapshot_problem and f"no snapshot, and so no retention: {snapshot_problem}"),
            details={
                "broker_group": self._broker_group,
                "broker_id": self._broker_id,
                "opening": self._opening_name,
                "metaservers": list(self._metaservers),
                "writable": not (read_only or waits),
                "registration": self._registration() or "registered",
                "partitions": len(self._store.state.partitions),
                "first_position": self._store.log.first_position,
                "next_position": self._store.log.end,
                "cut_bytes": self._store.recovered.cut_bytes,
                "durable": DURABLE,
                "snapshot_position": self._store.snapshotter.position,
                "snapshot": snapshot_problem or "written when it is due",
                "retention": self._retention() or "ok",
                "damage": describe_damage(self._store.state),
                "commits": self._store.commit.commits,
                "scheduled": self._scheduled(),
                **self._site._asdict(),
                "copies": self._copies(),
                "waits_for_copies": waits,
                "wall_ms": self._clock.wall_ms(),
            },
        )


def _seal_problem(store: Store, partition: HostedPartition) -> str:
    """Return the reason why a seal would be refused, ignoring overload; "" if it would be
    accepted.
    """
    if partition.sealed:
        return ""
    try:
        store.check_seal(partition)
    except (CorruptLogError, BrokerReadOnlyError) as error:
        return error.message
    except OverloadedError:
        pass
    return ""


def partition_id_of(params: Params) -> int:
    """Return the partition id from the path of a call. Raises InvalidRequestError."""
    partition_id = parse_number(params["id"])
    if partition_id is None:
        raise InvalidRequestError(f"not a partition id: {params['id'][:40]!r}")
    return partition_id
