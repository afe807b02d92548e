"""Answers requests about the messages that consumer groups have parked: from owners by frames, and
from operators by HTTP.

    ChangeParked ─▶ check ─▶ apply
        ─▶ PARKED record, with the cursor after it, in one commit ─▶ durable
    AdoptParked, from a child's owner ─▶ Freeze, durable ─▶ a page of the parent's parked messages
    ReleaseParked, from a child's owner ─▶ apply AncestorReleased ─▶ PARKED record ─▶ durable
    EditParked, from an operator ─▶ check ─▶ apply ─▶ PARKED record ─▶ durable
    POST /v1/partitions/{id}/parked
        ─▶ the same; then the owner's waiting pull is answered, so it lists the keys again

Invariant
    Nothing is answered before it is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Sequence
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
    AdoptParked,
    ChangeParked,
    EditParked,
    ListParked,
    ParkedChanged,
    ParkedEdited,
    ParkedKeys,
    ParkedRows,
    ParkedToAdopt,
    ReadEdited,
    ReadParked,
    ReleaseParked,
)
from ..protocol.groups import TRIES_LIMIT
from ..protocol.ids import NAME_CHARS_MAX, check_name
from ..protocol.limits import LOGICAL_PARTITIONS, MESSAGE_BYTES_MAX
from ..protocol.message import (
    EDITED_PROPERTY,
    check_message_size,
    pack_properties,
    unpack_properties,
)
from ..protocol.parked import (
    PARKED_ROWS_MAX,
    AncestorReleased,
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
    RequestedChange,
    Unpark,
    decode_changes,
    encode_parked,
)
from ..protocol.text import MAYBE_OLDER_COPY, format_time, key_digest, parse_number
from ..rpc.plane.prompt import Handled
from ..rpc.server import ControlRoute, Params, check_params, whole_number
from .answering.request_checks import check_owner
from .control import partition_id_of
from .folder_ownership import FolderOwnership, check_copied, check_folder_ownership
from .partition.park_views import (
    build_adoption_page,
    build_parked_list,
    changes_for_operator,
    decode_key,
    list_offsets_with_failures,
    list_parked_keys,
    list_parked_offsets,
)
from .partition.parked import NextTry, Parked
from .partition.parked_key import NO_LOGICAL_PARTITION
from .partition.partition import Group, HostedPartition
from .service import BrokerService
from .store.parking import change_parked
from .store.store import Store

log = logging.getLogger("keylane.broker")
_NOT_FOR_OWNERS = DeadLetterKey | Clear | Edit | Freeze | Redrive | AncestorReleased
LISTED_KEYS_DEFAULT = 100
LISTED_KEYS_MAX = 1_000


class Parking:
    """Answers requests about parked messages. Registers itself for the frames at `service`."""

    def __init__(
        self,
        store: Store,
        service: BrokerService,
        *,
        clock: Clock,
        folder_ownership: FolderOwnership | None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._folder_ownership = folder_ownership
        service.register_handler(ChangeParked, self._handle_change)
        service.register_handler(ListParked, self._handle_list)
        service.register_handler(ReadParked, self._handle_read)
        service.register_handler(AdoptParked, self._handle_adopt)
        service.register_handler(ReleaseParked, self._handle_release)
        service.register_handler(EditParked, self._handle_edit)
        service.register_handler(ReadEdited, self._handle_read_edited)

    def routes(self) -> list[ControlRoute]:
        """Return the routes of the operators' HTTP calls."""
        return [
            ControlRoute(PARKED, self.list_keys),
            ControlRoute(PARKED_OFFSETS, self.list_offsets),
            ControlRoute(CHANGE_PARKED, self.change_key),
        ]

    # ── owners ────────────────────────────────────────────────────────────────────────────────────
    async def _handle_change(self, request: ChangeParked, payload: memoryview) -> Handled:
        partition, group = check_owner(self._store.state, request, self._clock.boot_ms())
        try:
            changes = decode_changes(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"unreadable changes: {error}") from error
        if any(isinstance(change, _NOT_FOR_OWNERS) for change in changes):
            raise InvalidRequestError("an owner may not make this change")
        await self._apply_changes(partition, group, changes, request.next_tries)
        if group.in_flight is not None and group.in_flight.remove_acked(group.acked):
            # A message that must be handled alone may be next.
            self._store.wake(partition.partition_id)
        return ParkedChanged(group.parked_version), b""

    def _apply_changes(
        self,
        partition: HostedPartition,
        group: Group,
        changes: Sequence[RequestedChange],
        next_tries: Sequence[NextTry] = (),
    ) -> Awaitable[object]:
        now_ms = self._clock.wall_ms()
        return change_parked(
            self._store, partition, group, changes, at_ms=now_ms, next_tries=next_tries
        )

    async def _handle_list(self, request: ListParked, _payload: memoryview) -> Handled:
        _, group = check_owner(self._store.state, request, self._clock.boot_ms())
        if request.first < 0:
            raise InvalidRequestError(f"first must not be negative: {request.first}")
        parked = group.parked
        if parked is not None:
            # An owner lists keys after it has adopted those of the parents.
            parked.partly_adopted_parents = set()
        rows = [] if parked is None else list_parked_keys(parked, request.first)
        next_row = request.first + len(rows)
        has_more = parked is not None and next_row < len(parked)
        ancestors = () if parked is None else parked.unneeded_ancestors()
        version = group.parked_version
        if (
            parked is not None
            and parked.has_redriving_keys
            and not self._is_redriver(group, request.session)
        ):
            rows = [
                replace(row, state=ParkState.PARKED) if row.state is ParkState.REDRIVING else row
                for row in rows
            ]
            # The session that redrives may have ended, so this one lists the keys again with its
            # next ack, because that answers with a higher version.
            version -= 1
        answer = ParkedKeys(version, next_row if has_more else None, ancestors)
        return answer, encode_parked(rows)

    def _is_redriver(self, group: Group, session: str) -> bool:
        """Return True if this session redrives the group's parked messages. In a shared group, only
        one session does.
        """
        if not group.lock.is_shared:
            return True
        return group.current_in_flight().is_redriver(session, self._clock.boot_ms())

    async def _handle_read(self, request: ReadParked, _payload: memoryview) -> Handled:
        _, group = check_owner(self._store.state, request, self._clock.boot_ms())
        if request.count < 1 or request.first < 0:
            raise InvalidRequestError("count must be at least 1, and first at least 0")
        if group.parked is None:
            return ParkedRows((), 0), b""
        page = list_parked_offsets(
            group.parked, request.key, count=request.count, first=request.first
        )
        return ParkedRows(tuple(page.rows), page.messages, tuple(page.edited)), b""

    async def _handle_adopt(self, request: AdoptParked, _payload: memoryview) -> Handled:
        partition = self._store.state.partition(request.partition_id)
        partition.check_fences_known()
        group = partition.groups.get(request.group)
        if not (
            0 <= request.range_start < request.range_end <= LOGICAL_PARTITIONS
            and request.first_row >= 0
        ):
            raise InvalidRequestError("not a range of logical partitions, or not a row")
        if group is None or not group.parked:
            if not (group and partition.ended and group.has_drained(partition.next_offset)):
                self._check_folder_accepted(partition)
            return ParkedToAdopt(None), encode_parked(())
        if not (partition.ended and group.has_drained(partition.next_offset)):
            raise BusyError(
                Reason.GROUP_BUSY,
                f"group {group.name!r} has not handled all of partition {partition.partition_id}",
            )
        await self._apply_changes(partition, group, [Freeze()])
        first_logical_partition = partition.facts.partition.range_start

        def is_adopted(logical_partition: int) -> bool:
            # Loose and displaced messages go to the child with the parent's first logical
            # partition.
            if logical_partition == NO_LOGICAL_PARTITION:
                logical_partition = first_logical_partition
            return request.range_start <= logical_partition < request.range_end

        keys, next_row = build_adoption_page(group.parked, is_adopted, first_row=request.first_row)
        return ParkedToAdopt(
            next_row, tuple(sorted(group.parked.retaining_ancestors))
        ), encode_parked(keys)

    def _check_folder_accepted(self, partition: HostedPartition) -> None:
        """
        Raise BusyError if no metaserver has accepted this data folder, because it may be an older
        copy.

        Called when the owner of a child asks about a group that has not drained the parent here.
        In an accepted folder, this means that the group has parked nothing.
        """
        if self._folder_ownership is not None and not self._folder_ownership.accepted:
            raise BusyError(
                Reason.GROUP_BUSY,
                f"the broker of partition {partition.partition_id} knows no parked messages "
                f"there, and {MAYBE_OLDER_COPY}",
            )

    async def _handle_release(self, request: ReleaseParked, _payload: memoryview) -> Handled:
        """Record that a descendant no longer needs the messages parked on this ancestor."""
        partition = self._store.state.partition(request.partition_id)
        partition.check_fences_known()
        group = partition.groups.get(request.group)
        if not 0 <= request.range_start < request.range_end <= LOGICAL_PARTITIONS:
            raise InvalidRequestError("not a range of logical partitions")
        if group is None or group.parked is None or not group.parked.keeps_for_children:
            return ParkedChanged(0), b""
        if request.token < group.lock.fence:
            # Only this partition was reset after the owner was granted the child, so it may have
            # parked messages again.
            raise FencedError(token=request.token, current_token=group.lock.fence)
        change = AncestorReleased(request.range_start, request.range_end, request.includes_loose)
        await self._apply_changes(partition, group, [change])
        return ParkedChanged(group.parked_version), b""

    # ── operators ─────────────────────────────────────────────────────────────────────────────────
    async def list_keys(self, _body: object, params: Params) -> ParkedList:
        """Return a page of the keys that a group has parked on a partition."""
        await check_copied(self._folder_ownership)
        check_params(PARKED, params)
        first = whole_number(params, "first", 0, low=0)
        count = whole_number(params, "count", LISTED_KEYS_DEFAULT, low=1, high=LISTED_KEYS_MAX)
        partition, group = self._find_named_group(params, params.get("group", ""))
        if group.parked is None:
            return ParkedList(
                partition_id=partition.partition_id,
                group=group.name,
                frozen=False,
                keys=[],
                more=False,
                adopted=[],
            )
        retrying = whole_number(params, "retrying", 0, low=0, high=1) == 1
        return build_parked_list(
            group.parked,
            group.name,
            first,
            count,
            key=decode_key(params.get("key")),
            retrying=retrying,
            next_tries=self._has_owner(group),
        )

    def _has_owner(self, group: Group) -> bool:
        """Return True while a session holds the lock. Only then are the reported retry times valid,
        because a new owner retries immediately.
        """
        return group.lock.holder_at(self._clock.boot_ms()) is not None

    async def list_offsets(self, _body: object, params: Params) -> ParkedOffsets:
        """Return the partitions and offsets of a key's parked messages."""
        await check_copied(self._folder_ownership)
        check_params(PARKED_OFFSETS, params)
        first = whole_number(params, "first", 0, low=0)
        count = whole_number(params, "count", PARKED_ROWS_MAX, low=1)
        partition, group = self._find_named_group(params, params.get("group", ""))
        key: ParkKey = decode_key(params.get("key"))
        if "tries" in params:
            key = whole_number(params, "tries", 0, low=-TRIES_LIMIT, high=TRIES_LIMIT)
        if group.parked is None or group.parked.get(key) is None:
            raise NotFoundError(Reason.PARKED_KEY_UNKNOWN, partition_id=partition.partition_id)
        after_ref = params.get("after")
        if after_ref is None:
            return list_parked_offsets(group.parked, key, count=count, first=first)
        return list_offsets_with_failures(
            group.parked,
            key,
            after=_parse_message_ref(after_ref),
            count=count,
            next_tries=self._has_owner(group),
        )

    async def change_key(self, body: ChangeParkedKey, params: Params) -> ParkedList:
        """
        Redrive a parked key, or skip some of its messages, durably. Repeating the call has no
        effect.

        Raises:
            BusyError: a consumer may already have messages that are to be skipped.
        """
        await check_folder_ownership(self._folder_ownership)
        partition, group = self._find_named_group(params, body.group)
        changes = changes_for_operator(body)
        parked = group.parked
        if parked is None or parked.get(decode_key(body.key_hex)) is None:
            raise NotFoundError(Reason.PARKED_KEY_UNKNOWN, partition_id=partition.partition_id)
        _check_not_being_adopted(parked)
        _check_not_handled(parked, changes, group.lock.fence)
        await self._apply_changes(partition, group, changes)
        # The log's end only rises, even over restarts, so no version is used twice.
        parked.version = max(parked.version + 1, self._store.log.end)
        self._store.wake(partition.partition_id)
        return build_parked_list(parked, group.name, 0, 0)

    async def _handle_edit(self, request: EditParked, payload: memoryview) -> Handled:
        partition, group = self._find_group(request.partition_id, request.group)
        value, edited_at_ms = bytes(payload), self._clock.wall_ms()
        try:
            properties = dict(unpack_properties(request.properties))
        except CorruptBatchError as error:
            raise InvalidRequestError(error.message) from error
        packed_properties = pack_properties(
            properties | {EDITED_PROPERTY: format_time(edited_at_ms)}, kept=properties
        )
        limit = partition.facts.message_bytes_max or MESSAGE_BYTES_MAX
        check_message_size(len(request.key or b""), len(value), len(packed_properties), limit)
        message = EditedMessage(request.source, request.offset, value, packed_properties)
        _check_not_being_adopted(group.parked)
        await self._apply_changes(partition, group, [Edit(request.key, message)])
        log.info(
            "group %s, partition %d: parked message at offset %d of partition %d, %s, was edited: "
            "%d bytes of value, %s",
            *(group.name, partition.partition_id, request.offset, request.source),
            "a dead letter" if request.key is None else key_digest(request.key),
            *(len(value), f"BLAKE2b {blake2b(value, digest_size=8).hexdigest()}"),
        )
        return ParkedEdited(packed_properties), value

    async def _handle_read_edited(self, request: ReadEdited, _payload: memoryview) -> Handled:
        partition, group = self._find_group(request.partition_id, request.group)
        parked = group.get_or_create_parked(partition.facts.partition)
        edit = parked.find_edit(request.key, (request.source, request.offset))
        if edit is None:
            return ParkedEdited(None), b""
        return ParkedEdited(edit.properties), edit.value

    def _find_group(self, partition_id: int, name: str) -> tuple[HostedPartition, Group]:
        partition = self._store.state.partition(partition_id)
        group = partition.groups.get(name)
        if group is None:
            raise GroupUnknownError(
                f"group {name!r:.{NAME_CHARS_MAX + 2}} never read partition {partition_id}",
                group=name,
            )
        return partition, group

    def _find_named_group(self, params: Params, name: str) -> tuple[HostedPartition, Group]:
        """Find the partition and the group that an HTTP request names."""
        partition_id = partition_id_of(params)
        self._store.state.partition(partition_id)
        check_name("consumer group", name)
        return self._find_group(partition_id, name)


def _check_not_being_adopted(parked: Parked | None) -> None:
    """
    Raise StaleRouteError if an operator must not change the messages, because children adopt them,
    or because those of a parent are only partly adopted.

    If the owner that adopts them stopped now, the next one would adopt all of them again.
    """
    if parked is not None and parked.frozen:
        raise StaleRouteError(Reason.PARK_MOVED, partition_id=parked.partition_id)
    if parked is not None and parked.partly_adopted_parents:
        raise StaleRouteError(
            Reason.PARK_MOVED,
            f"partition {parked.partition_id} is adopting the parked messages of partition "
            f"{min(parked.partly_adopted_parents)}: try again",
            partition_id=parked.partition_id,
        )


def _check_not_handled(parked: Parked, changes: Iterable[RequestedChange], token: int) -> None:
    """Raise BusyError if an operator skips messages that the owner with this token may be handling:
    it would handle those that it has read.
    """
    for change in changes:
        parked_key = parked.get(change.key) if isinstance(change, Unpark) else None
        if (
            isinstance(change, Unpark)
            and parked_key is not None
            and parked_key.is_being_handled(token)
            and parked_key.intersects(change.source, change.ranges)
        ):
            raise BusyError(Reason.PARKED_REDRIVEN, partition_id=parked.partition_id)


def _parse_message_ref(text: str) -> tuple[int, int]:
    """Parse a partition and an offset such as "7:42", or raise InvalidRequestError."""
    source, offset = (parse_number(number) for number in text.partition(":")[::2])
    if source is None or offset is None:
        raise InvalidRequestError(
            f"expected a partition and an offset such as 7:42, not {text!r:.80}"
        )
    return source, offset
