"""Decides which requested changes to parked messages are written: skips those that were already
made, and checks that the others are allowed. Pure.

Invariants
    Only unacked messages are parked, so a repeated request never parks messages that have been
    handled in the meantime. Each change is checked against the state after the earlier changes of
    the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from ...protocol.errors import (
    BusyError,
    InvalidRequestError,
    OverloadedError,
    Reason,
    StaleRouteError,
)
from ...protocol.groups import TRIES_LIMIT
from ...protocol.ids import MAX_I64
from ...protocol.limits import KEY_BYTES_MAX
from ...protocol.offsets import AckedOffsets, Range
from ...protocol.parked import (
    EDITS_BYTES_MAX,
    EDITS_MAX,
    LOOSE,
    PARKED_KEYS_MAX,
    PARKED_MESSAGES_MAX,
    PARKED_ROWS_MAX,
    RETRIED,
    Adopt,
    AdoptedKey,
    AncestorNotified,
    AncestorReleased,
    Clear,
    DeadLetterKey,
    Edit,
    FailAgain,
    Free,
    Freeze,
    Park,
    ParkChange,
    ParkKey,
    ParkOrDeadLetter,
    ParkState,
    Redrive,
    RequestedChange,
    Shift,
    Unpark,
    is_loose,
)
from .acks import decide_ack
from .offset_ranges import OffsetRanges
from .parked import Parked
from .parked_key import count_messages


def decide_park_changes(
    parked: Parked,
    changes: Iterable[RequestedChange],
    acked: AckedOffsets,
    *,
    next_offset: int,
    token: int,
) -> list[ParkChange]:
    """
    Return the changes that must be written for a request.

    Args:
        acked: the progress of the group.
        next_offset: the offset that follows the last message that may be parked.
        token: the group's fence. Messages that an earlier owner was handling do not count as being
            handled.

    Raises:
        StaleRouteError: the children have adopted these messages.
        OverloadedError: a limit would be exceeded, for example that of acked ranges above the
            cursor.
        InvalidRequestError: a change is impossible.
        NotFoundError, BusyError: a message cannot be edited.
    """
    return _ChangeChecker(parked, acked, next_offset, token).check(changes)


_PRECEDENCE = ParkState.PARKED, ParkState.DEAD, ParkState.REDRIVING


class _ChangeChecker:
    """Checks changes one after another, taking the effects of the earlier ones into account."""

    def __init__(self, parked: Parked, acked: AckedOffsets, next_offset: int, token: int) -> None:
        self._parked = parked
        self._acked = acked
        self._next_offset = next_offset
        self._token = token
        self._newly_parked = OffsetRanges()
        """All messages that the request parks."""
        self._added_offsets: dict[ParkKey, OffsetRanges] = {}
        """Maps each key to the messages that the request parks under it."""
        self._removed_offsets: dict[tuple[ParkKey, int], OffsetRanges] = {}
        """Maps each (key, source) to the messages that the request removes."""
        self._changed_states: dict[ParkKey, ParkState | None] = {}
        """Maps each key to its state after the changes so far; None if it was freed."""
        self._still_redriving: set[ParkKey] = set()
        """The loose keys whose redrive continues although one of their messages failed again."""
        self._is_cleared = False
        """True once the request has removed all parked messages."""
        self._has_other_changes = False
        """True once the request has made a change other than an adoption."""
        self._adopted_offsets: dict[tuple[ParkKey, int], OffsetRanges] = {}
        """Maps each (key, source) to the messages that the request adopts."""
        self._live_usage, self._dead_usage = _count_usage(parked)
        self._check_by_type: dict[type[Any], Callable[[Any], ParkChange | None]] = {
            Park: self._check_park,
            ParkOrDeadLetter: self._check_park_or_dead_letter,
            Unpark: self._check_unpark,
            Free: self._check_free,
            Shift: self._check_shift,
            FailAgain: self._check_fail_again,
            Redrive: self._check_redrive,
            Adopt: self._check_adopt,
            Freeze: lambda change: None if parked.frozen else change,
            Clear: self._check_clear,
            AncestorReleased: lambda change: change if parked.keeps_for_children else None,
            Edit: self._check_edit,
            AncestorNotified: self._check_notification,
        }

    def check(self, changes: Iterable[RequestedChange]) -> list[ParkChange]:
        """Check all changes, and return those that must be written."""
        changes_to_write = []
        for change in changes:
            is_frozen = self._parked.frozen and not self._is_cleared
            if is_frozen and not isinstance(change, Freeze | Clear | AncestorReleased):
                raise StaleRouteError(Reason.PARK_MOVED, partition_id=self._parked.partition_id)
            self._has_other_changes = self._has_other_changes or not isinstance(change, Adopt)
            change_to_write = self._check_by_type[type(change)](change)
            if change_to_write is not None:
                changes_to_write.append(change_to_write)
        self._check_limits()
        # A key whose last message was skipped by an operator needs no further call: the owner
        # frees it.
        emptied_keys = [
            key
            for key in dict.fromkeys(key for key, _ in self._removed_offsets)
            if not (is_loose(key) or self._count_remaining(key))
            and self._current_state(key) in {ParkState.PARKED, ParkState.DEAD}
        ]
        redriving_keys = [
            key for key in LOOSE if key in self._still_redriving and self._count_remaining(key)
        ]
        return changes_to_write + [Redrive(key) for key in (*emptied_keys, *redriving_keys)]

    def _current_state(self, key: ParkKey) -> ParkState | None:
        """Return the state of a key after the changes so far, or None if it is not parked."""
        parked_key = self._parked.get(key)
        return self._changed_states.get(key, None if parked_key is None else parked_key.state)

    def _is_being_handled(self, key: ParkKey) -> bool:
        """Return True if an owner may be handling messages of the key."""
        parked_key = self._parked.get(key)
        return self._current_state(key) is ParkState.REDRIVING or (
            parked_key is not None and parked_key.is_being_handled(self._token)
        )

    def _count_remaining(self, key: ParkKey) -> int:
        """Return the number of parked messages of a key after the changes so far."""
        parked_key = self._parked.get(key)
        added_offsets = self._added_offsets.get(key)
        removed_count = sum(
            offset_ranges.messages
            for (other_key, _), offset_ranges in self._removed_offsets.items()
            if other_key == key
        )
        return (
            (parked_key.messages if parked_key else 0)
            + (added_offsets.messages if added_offsets else 0)
            - removed_count
        )

    def _check_limits(self) -> None:
        names = ("parked keys", "parked messages"), ("dead keys", "dead letters")
        for usage, (keys, messages) in zip(
            (self._live_usage, self._dead_usage), names, strict=True
        ):
            if usage.keys and usage.exceeds_keys(PARKED_KEYS_MAX):
                raise OverloadedError(
                    Reason.PARK_FULL,
                    f"the group has {usage.keys_before} {keys} on partition "
                    f"{self._parked.partition_id}",
                    limit=PARKED_KEYS_MAX,
                )
            if usage.messages and usage.exceeds_messages(PARKED_MESSAGES_MAX):
                raise OverloadedError(
                    Reason.PARK_FULL,
                    f"the group has {usage.messages_before} {messages} on partition "
                    f"{self._parked.partition_id}",
                    limit=PARKED_MESSAGES_MAX,
                )
        decide_ack(self._acked, list(self._newly_parked), next_offset=self._next_offset)

    def _check_park(self, change: Park, usage: _CapacityUsage | None = None) -> Park | None:
        new_ranges = self._claim_ranges(change)
        is_known = self._current_state(change.key) is not None
        # Loose messages that are already acked, for example because retention removed them, do
        # not affect the others.
        is_unaffected = (
            change.failure is None or not is_known or (is_loose(change.key) and change.ranges)
        )
        if not new_ranges and is_unaffected:
            return None
        self._add_offsets(change.key, new_ranges)
        if change.failure is not None:
            if not (is_loose(change.key) and change.ranges):
                self._still_redriving.discard(change.key)
            elif self._current_state(change.key) is ParkState.REDRIVING:
                self._still_redriving.add(change.key)
            self._changed_states[change.key] = ParkState.PARKED
        is_dead = change.key is None or self._current_state(change.key) is ParkState.DEAD
        usage = usage or (self._dead_usage if is_dead else self._live_usage)
        usage.messages += count_messages(new_ranges)
        usage.keys += not is_known and change.key is not None
        return Park(change.key, new_ranges, change.failure, self._owner_token_after(change))

    def _owner_token_after(self, change: Park) -> int:
        """Return the token of the owner that handles messages of the key after a Park change, or 0
        if there is none.
        """
        if change.token not in {0, self._token}:
            raise InvalidRequestError(f"{change.token} is not the owner's token")
        parked_key = self._parked.get(change.key)
        if (
            change.failure is None
            or parked_key is None
            or not (is_loose(change.key) and change.ranges)
        ):
            return change.token
        return (
            parked_key.owner_token
        )  # only one loose message failed; the owner still handles the others

    def _check_park_or_dead_letter(self, change: ParkOrDeadLetter) -> Park | DeadLetterKey | None:
        key, failure = change.key, change.failure
        state = self._current_state(key)
        new_count = count_messages(self._unacked_ranges(change))
        fits = not (
            self._live_usage.exceeds_messages(PARKED_MESSAGES_MAX, new_count)
            or (state is None and self._live_usage.exceeds_keys(PARKED_KEYS_MAX, 1))
        )
        if fits or key is None or (failure is None and state is ParkState.DEAD):
            return self._check_park(Park(key, change.ranges, failure))
        if failure is None and state is ParkState.REDRIVING:
            # The key is being handled and keeps its state, but its messages count as dead letters.
            return self._check_park(Park(key, change.ranges), self._dead_usage)
        if is_loose(key):
            return self._check_park(Park(None, change.ranges, failure))
        assert isinstance(key, bytes)
        new_ranges = self._claim_ranges(change)
        if not new_ranges and failure is None:
            return None
        parked_key = self._parked.get(key)
        self._add_offsets(key, new_ranges)
        self._changed_states[key] = ParkState.DEAD
        # The whole key becomes dead. The capacity that this frees is only available to later
        # requests.
        moved_count = (
            parked_key.messages if parked_key is not None and state is not ParkState.DEAD else 0
        )
        self._dead_usage.messages += moved_count + count_messages(new_ranges)
        self._dead_usage.keys += 1
        return DeadLetterKey(key, new_ranges, failure)

    def _claim_ranges(self, change: Park | ParkOrDeadLetter) -> tuple[Range, ...]:
        """Add the unacked messages of a change to those that the request parks. Return the ones
        that it has not parked before.
        """
        unacked = self._unacked_ranges(change)
        return tuple(new for start, end in unacked for new in self._newly_parked.add(start, end))

    def _unacked_ranges(self, change: Park | ParkOrDeadLetter) -> list[Range]:
        """Check the key and the ranges of a change, and return its unacked messages."""
        _check_key(change.key)
        _check_ranges(change.ranges, self._next_offset)
        if self._current_state(change.key) is None and change.failure is None:
            raise InvalidRequestError("the key is not parked, and no failure is given")
        return [
            unacked
            for start, end in change.ranges
            for unacked in _unacked_ranges(self._acked, start, end)
        ]

    def _add_offsets(self, key: ParkKey, new_ranges: Iterable[Range]) -> None:
        added_offsets = self._added_offsets.setdefault(key, OffsetRanges())
        for start, end in new_ranges:
            added_offsets.add(start, end)

    def _check_unpark(self, change: Unpark) -> Unpark | None:
        _check_ranges(change.ranges, MAX_I64)
        if self._current_state(change.key) is None:
            return None
        removed_offsets = self._removed_offsets.setdefault(
            (change.key, change.source), OffsetRanges()
        )
        parked_key, added_offsets = (
            self._parked.get(change.key),
            self._added_offsets.get(change.key),
        )
        candidates = [] if parked_key is None else [parked_key.offsets_by_source.get(change.source)]
        candidates += [added_offsets] if change.source == self._parked.partition_id else []
        for start, end in change.ranges:
            for offset_ranges in candidates:
                for low, high in offset_ranges.intersection(start, end) if offset_ranges else ():
                    removed_offsets.add(low, high)
        return change

    def _check_fail_again(self, change: FailAgain) -> FailAgain | None:
        _check_loose(change.key)
        _check_ranges(change.ranges, MAX_I64)
        return None if self._current_state(change.key) is None else change

    def _check_shift(self, change: Shift) -> Shift | None:
        _check_loose(change.key)
        _check_key(change.to)
        _check_ranges(change.ranges, MAX_I64)
        state = self._current_state(change.key)
        if change.key in {None, b""} and self._is_being_handled(change.key):
            raise BusyError(Reason.PARKED_REDRIVEN, partition_id=self._parked.partition_id)
        return None if state is None or change.to == change.key else change

    def _check_free(self, change: Free) -> Free | None:
        if self._current_state(change.key) is None:
            return None
        if remaining_count := self._count_remaining(change.key):
            raise InvalidRequestError(f"the key has {remaining_count} parked messages")
        self._changed_states[change.key] = None
        return change

    def _check_redrive(self, change: Redrive) -> Redrive | None:
        if self._current_state(change.key) not in {ParkState.PARKED, ParkState.DEAD}:
            return None
        self._changed_states[change.key] = ParkState.REDRIVING
        return change

    def _check_edit(self, change: Edit) -> Edit:
        new_edit, parked = change.message, self._parked
        previous_edit = parked.find_edit(change.key, (new_edit.source, new_edit.offset))
        if self._is_being_handled(change.key):
            raise BusyError(Reason.PARKED_REDRIVEN, partition_id=parked.partition_id)
        other_edits = [
            other_edit for _, other_edit in parked.list_edits() if other_edit is not previous_edit
        ]
        if len(other_edits) >= EDITS_MAX:
            raise OverloadedError(
                Reason.EDITS_FULL,
                f"the group has {len(other_edits)} edited messages",
                limit=EDITS_MAX,
            )
        size_bytes = sum(
            len(each.value) + len(each.properties) for each in (*other_edits, new_edit)
        )
        if size_bytes > EDITS_BYTES_MAX:
            raise OverloadedError(
                Reason.EDITS_FULL,
                f"the group's edited messages would have {size_bytes} bytes",
                limit=EDITS_BYTES_MAX,
            )
        return change

    def _check_clear(self, change: Clear) -> Clear | None:
        self._is_cleared = True
        return change if self._parked else None

    def _check_notification(self, change: AncestorNotified) -> AncestorNotified | None:
        return change if change.source in self._parked.retaining_ancestors else None

    def _is_adoption_current(self, parent: int) -> bool:
        """Return True if this owner or a later one has adopted from a parent. If an earlier owner
        did, there may have been a reset since, so the adoption must be repeated.
        """
        under = self._parked.adoption_tokens.get(parent, self._token)
        return parent in self._parked.adopted_parents and under >= self._token

    def _check_adopt(self, change: Adopt) -> Adopt | None:
        if self._is_adoption_current(change.parent):
            return None
        if change.passed or change.children_notify_ancestors:
            if not self._is_cleared:
                raise InvalidRequestError("only a reset may set what children keep")
            return change
        rows = [row for key in change.keys for row in key.rows]
        if not 1 <= change.parent <= MAX_I64 or change.parent == self._parked.partition_id:
            raise InvalidRequestError(
                f"not a parent of partition {self._parked.partition_id}: {change.parent}"
            )
        if len(rows) > PARKED_ROWS_MAX:
            raise InvalidRequestError(f"{len(rows)} rows: at most {PARKED_ROWS_MAX} in one change")
        for key in change.keys:
            _check_key(key.key)
        for source, start, end in rows:
            _check_ranges(((start, end),), MAX_I64)
            if not 1 <= source <= MAX_I64:
                raise InvalidRequestError(f"no partition {source}")
        return replace(
            change,
            keys=tuple(
                self._merge_with_parked(self._drop_unparked_details(key)) for key in change.keys
            ),
        )

    def _drop_unparked_details(self, key: AdoptedKey) -> AdoptedKey:
        """
        Return a key without the marks and edits of messages that are not parked under it.

        They have no effect now, but would have one if a restart replayed this change after these
        messages had been parked.
        """
        for source, start, end in key.rows:
            self._adopted_offsets.setdefault((key.key, source), OffsetRanges()).add(start, end)
        if not (key.marks or key.edits):
            return key
        marks = tuple(
            replace(mark, start=low, end=high)
            for mark in key.marks
            for offset_ranges in self._find_offsets(key.key, mark.source)
            for low, high in offset_ranges.intersection(mark.start, mark.end)
        )
        edits = tuple(
            edited
            for edited in key.edits
            if any(
                any(offset_ranges.intersection(edited.offset, edited.offset + 1))
                for offset_ranges in self._find_offsets(key.key, edited.source)
            )
        )
        return replace(key, marks=marks, edits=edits)

    def _find_offsets(self, key: ParkKey, source: int) -> list[OffsetRanges]:
        """Return the messages that are parked under a key before the next change."""
        adopted_offsets = self._adopted_offsets.get((key, source))
        parked_key = None if self._has_other_changes else self._parked.get(key)
        parked_offsets = None if parked_key is None else parked_key.offsets_by_source.get(source)
        return [
            offset_ranges
            for offset_ranges in (adopted_offsets, parked_offsets)
            if offset_ranges is not None
        ]

    def _merge_with_parked(self, key: AdoptedKey) -> AdoptedKey:
        """
        Merge an adopted key with the messages that are already parked under it, which usually come
        from another parent.

        A redrive of either extends to all messages of the key, and a dead key stays dead.
        """
        parked_key = self._parked.get(key.key)
        if parked_key is None or not parked_key.messages:
            return key
        state = max(key.state, parked_key.state, key=_PRECEDENCE.index)
        failures = [failure for failure in (parked_key.failure, key.failure) if failure is not None]
        failure = max(failures, key=lambda each: each.at_ms, default=None)
        return replace(key, state=state, failure=failure)


class _CapacityUsage:
    """
    Counts the keys and messages of one kind: those that a group has, and those that a request adds.

    Args:
        count: returns the exact numbers before the request. It is slow, so it is called only if the
            upper bound exceeds a limit.
    """

    def __init__(self, parked: Parked, count: Callable[[], tuple[int, int]]) -> None:
        self.keys = self.messages = 0
        """The numbers of keys and messages that the request adds."""
        self._upper_bound = len(parked), parked.messages
        self._count = count

    @cached_property
    def _counts_before(self) -> tuple[int, int]:
        return self._count()

    @property
    def keys_before(self) -> int:
        """The number of keys before the request."""
        return self._counts_before[0]

    @property
    def messages_before(self) -> int:
        """The number of messages before the request."""
        return self._counts_before[1]

    def exceeds_keys(self, limit: int, more: int = 0) -> bool:
        """Return True if the keys, plus `more`, exceed the limit."""
        added = self.keys + more
        return self._upper_bound[0] + added > limit and self.keys_before + added > limit

    def exceeds_messages(self, limit: int, more: int = 0) -> bool:
        """Return True if the messages, plus `more`, exceed the limit."""
        added = self.messages + more
        return self._upper_bound[1] + added > limit and self.messages_before + added > limit


def _count_usage(parked: Parked) -> tuple[_CapacityUsage, _CapacityUsage]:
    """Return the usage of parked keys and messages, and the usage of dead keys and dead letters."""

    def count_alive() -> tuple[int, int]:
        keys, messages = count_dead(parked)
        return len(parked) - (parked.get(None) is not None) - keys, parked.messages - messages

    return _CapacityUsage(parked, count_alive), _CapacityUsage(parked, lambda: count_dead(parked))


def count_dead(parked: Parked) -> tuple[int, int]:
    """Return the number of dead keys and the number of dead letters."""
    counts = [
        (int(isinstance(key, bytes)), each.messages)
        for key, each in parked.items()
        if key in {None, RETRIED} or each.state is ParkState.DEAD
    ]
    return sum(keys for keys, _ in counts), sum(messages for _, messages in counts)


def _check_key(key: ParkKey) -> None:
    if isinstance(key, int) and abs(key) > TRIES_LIMIT:
        raise InvalidRequestError(f"invalid number of failed tries: {key}")
    if isinstance(key, bytes) and len(key) > KEY_BYTES_MAX:
        raise InvalidRequestError(f"a key of {len(key)} bytes: at most {KEY_BYTES_MAX}")


def _check_loose(key: ParkKey) -> None:
    _check_key(key)
    if not is_loose(key):
        raise InvalidRequestError("only messages without a key fail and are counted separately")


def _check_ranges(ranges: Iterable[Range], next_offset: int) -> None:
    for start, end in ranges:
        if not 0 <= start < end <= next_offset:
            raise InvalidRequestError(f"not a range of stored messages: [{start}, {end})")


def _unacked_ranges(acked: AckedOffsets, start: int, end: int) -> Iterator[Range]:
    """Yield the parts of `[start, end)` that are not acked."""
    offset = acked.next_unacked(start)
    while offset < end:
        end_offset = min(end, acked.next_acked(offset))
        yield offset, end_offset
        offset = acked.next_unacked(end_offset)
