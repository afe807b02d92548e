"""Answers requests about the messages that consumer groups have set aside: those of owners by
frames, and those of operators by HTTP.

    ChangeParked ─▶ check ─▶ apply
        ─▶ PARKED record, with the cursor after it, in one commit ─▶ durable
    TakeParked, of a child's owner ─▶ Freeze, durable ─▶ what the parent has parked, by page
    EditParked, of an operator ─▶ check ─▶ apply ─▶ PARKED record ─▶ durable
    POST /v1/partitions/{id}/parked
        ─▶ the same, and the owner's waiting pull is answered: it asks for the keys again

Invariant
    Nothing is answered before it is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from ..protocol.clock import Clock
from ..protocol.endpoints import CHANGE_PARKED, PARKED, PARKED_OFFSETS
from ..protocol.errors import (
    BusyError,
    CorruptBatchError,
    FencedError,
    GroupUnknownError,
    InvalidRequestError,
    NotFoundError,
    Reason,
    StaleRouteError,
)
from ..protocol.frames import (
    ChangeParked,
    EditParked,
    LeaveParked,
    ListParked,
    ParkedChanged,
    ParkedEdited,
    ParkedKeys,
    ParkedRows,
    ParkedTaken,
    ReadEdited,
    ReadParked,
    TakeParked,
)
from ..protocol.groups import TRIES_MAX_MAX
from ..protocol.ids import check_name
from ..protocol.limits import LOGICAL_PARTITIONS, MESSAGE_BYTES_MAX
from ..protocol.message import (
    EDITED_PROPERTY,
    check_message_size,
    pack_properties,
    unpack_properties,
)
from ..protocol.parked import (
    PARKED_ROWS_MAX,
    AskedChange,
    ChangeParkedKey,
    Clear,
    DeadLetterKey,
    Edit,
    EditedMessage,
    Freeze,
    ParkedList,
    ParkedOffsets,
    ParkKey,
    ParkState,
    Redrive,
    Unneeded,
    decode_changes,
    encode_parked,
)
from ..protocol.routing import logical_partition
from ..protocol.scheduled.deliver_at import shown
from ..protocol.text import MAYBE_OLDER_COPY, key_digest, plain_number
from ..rpc.plane.prompt import Handled
from ..rpc.server import ControlRoute, Params, check_params, whole_number
from .answering.request_checks import owned
from .control import partition_id_of
from .partition.park_views import (
    adopted_page,
    detailed_offsets,
    key_of,
    listed_keys,
    operators_change,
    parked_keys,
    parked_offsets,
)
from .partition.parked import NextTry, Parked
from .partition.partition import Group, HostedPartition
from .service import BrokerService
from .standing import Standing, check_standing
from .store.parking import change_parked
from .store.store import Store

log = logging.getLogger("keylane.broker")
_NOT_OF_OWNERS = DeadLetterKey | Clear | Edit | Freeze | Redrive | Unneeded
LISTED_DEFAULT = 100
LISTED_MAX = 1_000


class Parking:
    """Answers requests about parked messages from a store. The frames arrive through `service`."""

    def __init__(
        self, store: Store, service: BrokerService, *, clock: Clock, standing: Standing | None
    ) -> None:
        self._store = store
        self._clock = clock
        self._standing = standing
        service.answer(ChangeParked, self._change)
        service.answer(ListParked, self._list)
        service.answer(ReadParked, self._read)
        service.answer(TakeParked, self._take)
        service.answer(LeaveParked, self._leave)
        service.answer(EditParked, self._edit)
        service.answer(ReadEdited, self._read_edited)

    def routes(self) -> list[ControlRoute]:
        """Return a route for each call of operators."""
        return [
            ControlRoute(PARKED, self.listed),
            ControlRoute(PARKED_OFFSETS, self.offsets),
            ControlRoute(CHANGE_PARKED, self.changed),
        ]

    # ── owners ────────────────────────────────────────────────────────────────────────────────────
    async def _change(self, request: ChangeParked, payload: memoryview) -> Handled:
        partition, group = owned(self._store.state, request, self._clock.boot_ms())
        try:
            changes = decode_changes(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"unreadable changes: {error}") from error
        if any(isinstance(change, _NOT_OF_OWNERS) for change in changes):
            raise InvalidRequestError("no change of an owner")
        await self._changed(partition, group, changes, request.next_tries)
        if group.in_flight is not None and group.in_flight.acked_since(group.acked):
            self._store.wake(partition.partition_id)  # for messages that wait to be handled alone
        return ParkedChanged(group.parked_version), b""

    def _changed(
        self,
        partition: HostedPartition,
        group: Group,
        changes: Sequence[AskedChange],
        next_tries: Sequence[NextTry] = (),
    ) -> Awaitable[object]:
        now_ms = self._clock.wall_ms()
        return change_parked(
            self._store, partition, group, changes, at_ms=now_ms, next_tries=next_tries
        )

    async def _list(self, request: ListParked, _payload: memoryview) -> Handled:
        _, group = owned(self._store.state, request, self._clock.boot_ms())
        if request.first < 0:
            raise InvalidRequestError(f"no key {request.first}")
        parked = group.parked
        if parked is not None:
            parked.taking = set()  # its owner asks after it has taken over what its parents have
        rows = [] if parked is None else parked_keys(parked, request.first)
        following = request.first + len(rows)
        more = parked is not None and following < len(parked)
        unneeded = () if parked is None else parked.unneeded()
        version = group.parked_version
        if parked is not None and parked.redriving and not self._redrives(group, request.session):
            rows = [
                replace(row, state=ParkState.PARKED) if row.state is ParkState.REDRIVING else row
                for row in rows
            ]
            # so that it asks again with its next ack: the session that redrives may have ended
            version -= 1
        answer = ParkedKeys(version, following if more else None, unneeded)
        return answer, encode_parked(rows)

    def _redrives(self, group: Group, session: str) -> bool:
        """Return True if this session redrives what the group has parked. In a shared group only
        one session does, because otherwise each would.
        """
        if not group.lock.shared:
            return True
        return group.handed_out().redrives(session, self._clock.boot_ms())

    async def _read(self, request: ReadParked, _payload: memoryview) -> Handled:
        _, group = owned(self._store.state, request, self._clock.boot_ms())
        if request.count < 1 or request.first < 0:
            raise InvalidRequestError("count is from 1 on, first from 0")
        if group.parked is None:
            return ParkedRows((), 0), b""
        places = parked_offsets(group.parked, request.key, count=request.count, first=request.first)
        return ParkedRows(tuple(places.rows), places.messages, tuple(places.edited)), b""

    async def _take(self, request: TakeParked, _payload: memoryview) -> Handled:
        partition = self._store.state.partition(request.partition_id)
        partition.check_owners()
        group = partition.groups.get(request.group)
        if not (0 <= request.start < request.end <= LOGICAL_PARTITIONS and request.first >= 0):
            raise InvalidRequestError("no range of logical partitions, or no row")
        if group is None or not group.parked:
            if not (group and partition.ended and group.drained(partition.next_offset)):
                self._check_folder(partition)
            return ParkedTaken(None), encode_parked(())
        if not (partition.ended and group.drained(partition.next_offset)):
            raise BusyError(
                Reason.GROUP_BUSY,
                f"group {group.name!r} has not handled all of partition {partition.partition_id}",
            )
        await self._changed(partition, group, [Freeze()])
        loose = request.start <= partition.facts.partition.range_start < request.end

        def wanted(key: ParkKey) -> bool:
            # Messages without an order belong to one child: the one that has the parent's first
            # logical partition.
            if not isinstance(key, bytes) or not key:
                return loose
            return request.start <= logical_partition(key) < request.end

        keys, following = adopted_page(group.parked, wanted, first=request.first)
        return ParkedTaken(following, tuple(sorted(group.parked.sources))), encode_parked(keys)

    def _check_folder(self, partition: HostedPartition) -> None:
        """
        Raise BusyError if no metaserver has accepted this data folder, because it may be an older
        copy.

        This is checked when the owner of a child asks about a group that has not drained the parent
        here. In an accepted copy, nothing more will arrive.
        """
        if self._standing is not None and not self._standing.accepted:
            raise BusyError(
                Reason.GROUP_BUSY,
                f"the broker of partition {partition.partition_id} knows nothing that is parked "
                f"there, and {MAYBE_OLDER_COPY}",
            )

    async def _leave(self, request: LeaveParked, _payload: memoryview) -> Handled:
        partition = self._store.state.partition(request.partition_id)
        partition.check_owners()
        group = partition.groups.get(request.group)
        if not 0 <= request.start < request.end <= LOGICAL_PARTITIONS:
            raise InvalidRequestError("no range of logical partitions")
        if group is None or group.parked is None or not group.parked.keeps_for_children:
            return ParkedChanged(0), b""
        if request.token < group.lock.fence:
            # The partition was reset alone after this owner was granted the child, and may have
            # parked messages again.
            raise FencedError(token=request.token, current_token=group.lock.fence)
        loose = request.start <= partition.facts.partition.range_start < request.end
        change = Unneeded(request.start, request.end, loose)
        await self._changed(partition, group, [change])
        return ParkedChanged(group.parked_version), b""

    # ── operators ─────────────────────────────────────────────────────────────────────────────────
    async def listed(self, _body: object, params: Params) -> ParkedList:
        """Return a page of the keys that a group has parked on a partition."""
        check_params(PARKED, params)
        first = whole_number(params, "first", 0, low=0)
        count = whole_number(params, "count", LISTED_DEFAULT, low=1, high=LISTED_MAX)
        partition, group = self._known(params, params.get("group", ""))
        if group.parked is None:
            return ParkedList(
                partition_id=partition.partition_id,
                group=group.name,
                frozen=False,
                keys=[],
                more=False,
            )
        retrying = whole_number(params, "retrying", 0, low=0, high=1) == 1
        tries = self._is_owned(group)
        return listed_keys(
            group.parked, group.name, first, count, retrying=retrying, next_tries=tries
        )

    def _is_owned(self, group: Group) -> bool:
        """Return True while the owner that reported when messages are tried again is there. Any
        other owner tries them at once.
        """
        return group.lock.holder(self._clock.boot_ms()) is not None

    async def offsets(self, _body: object, params: Params) -> ParkedOffsets:
        """Return where the parked messages of a key are."""
        check_params(PARKED_OFFSETS, params)
        first = whole_number(params, "first", 0, low=0)
        count = whole_number(params, "count", PARKED_ROWS_MAX, low=1)
        partition, group = self._known(params, params.get("group", ""))
        key: ParkKey = key_of(params.get("key"))
        if "tries" in params:
            key = whole_number(params, "tries", 0, low=-TRIES_MAX_MAX, high=TRIES_MAX_MAX)
        if group.parked is None or group.parked.get(key) is None:
            raise NotFoundError(Reason.PARKED_KEY_UNKNOWN, partition_id=partition.partition_id)
        after = params.get("after")
        if after is None:
            return parked_offsets(group.parked, key, count=count, first=first)
        tries = self._is_owned(group)
        return detailed_offsets(
            group.parked, key, after=_place(after), count=count, next_tries=tries
        )

    async def changed(self, body: ChangeParkedKey, params: Params) -> ParkedList:
        """Redrive a parked key, or skip some of its messages, durably. A repeated call changes
        nothing.
        """
        await check_standing(self._standing)
        partition, group = self._known(params, body.group)
        changes = operators_change(body)
        parked = group.parked
        if parked is None or parked.get(key_of(body.key_hex)) is None:
            raise NotFoundError(Reason.PARKED_KEY_UNKNOWN, partition_id=partition.partition_id)
        _check_whole(parked)
        await self._changed(partition, group, changes)
        # The log's end rises over restarts, so no version is used twice.
        parked.version = max(parked.version + 1, self._store.log.end)
        self._store.wake(partition.partition_id)
        return listed_keys(parked, group.name, 0, 0)

    async def _edit(self, request: EditParked, payload: memoryview) -> Handled:
        partition, group = self._of_group(request)
        value, at_ms = bytes(payload), self._clock.wall_ms()
        try:
            properties = dict(unpack_properties(request.properties))
        except CorruptBatchError as error:
            raise InvalidRequestError(error.message) from error
        packed = pack_properties(properties | {EDITED_PROPERTY: shown(at_ms)}, kept=properties)
        limit = partition.facts.message_bytes_max or MESSAGE_BYTES_MAX
        check_message_size(len(request.key or b""), len(value), len(packed), limit)
        message = EditedMessage(request.source, request.offset, value, packed)
        _check_whole(group.parked)
        await self._changed(partition, group, [Edit(request.key, message)])
        log.info(
            "group %s, partition %d: parked message at offset %d of partition %d, %s, was edited: "
            "%d bytes of value, %s",
            *(group.name, partition.partition_id, request.offset, request.source),
            "a dead letter" if request.key is None else key_digest(request.key),
            *(len(value), f"BLAKE2b {blake2b(value, digest_size=8).hexdigest()}"),
        )
        return ParkedEdited(packed), value

    async def _read_edited(self, request: ReadEdited, _payload: memoryview) -> Handled:
        partition, group = self._of_group(request)
        parked = group.parked_on(partition.partition_id)
        edited = parked.edited(request.key, (request.source, request.offset))
        if edited is None:
            return ParkedEdited(None), b""
        return ParkedEdited(edited.properties), edited.value

    def _of_group(self, request: EditParked | ReadEdited) -> tuple[HostedPartition, Group]:
        partition = self._store.state.partition(request.partition_id)
        group = partition.groups.get(request.group)
        if group is None:
            raise GroupUnknownError(
                f"group {request.group!r:.80} never read partition {request.partition_id}",
                group=request.group,
            )
        return partition, group

    def _known(self, params: Params, name: str) -> tuple[HostedPartition, Group]:
        partition = self._store.state.partition(partition_id_of(params))
        check_name("consumer group", name)
        group = partition.groups.get(name)
        if group is None:
            raise GroupUnknownError(
                f"group {name!r} never read partition {params['id']}", group=name
            )
        return partition, group


def _check_whole(parked: Parked | None) -> None:
    """Raise StaleRouteError while only a part of a parent's messages is here: if the owner ends
    now, the next one takes all of them over again.
    """
    if parked is not None and parked.taking:
        raise StaleRouteError(
            Reason.PARK_MOVED,
            f"parked messages of partition {min(parked.taking)} are being taken over by partition "
            f"{parked.own}: ask again",
            partition_id=parked.own,
        )


def _place(text: str) -> tuple[int, int]:
    """Return a partition and an offset from a text such as "7:42", or raise InvalidRequestError."""
    source, offset = (plain_number(each) for each in text.partition(":")[::2])
    if source is None or offset is None:
        raise InvalidRequestError(f"a partition and an offset, as 7:42, not {text!r:.80}")
    return source, offset
