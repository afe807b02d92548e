"""Holds the messages that a consumer group has parked on a partition. The same changes are applied
during recovery and in operation. Pure.

    park_checks (raises, or returns the changes to write)
        ──▶ apply (immediately; returns its undo) ──▶ the record in the log

Invariants
    A parked message is acked, and stays parked until an Unpark or a Clear. A loose key exists only
    while it has messages. The messages of a key are in the order in which they were sent: sorted by
    source, because a partition has a higher id than its ancestors, and then by offset. Replaying
    earlier changes, followed by all later ones, leads to the same state; therefore the state of a
    key is always set by a change, never derived from its number of messages. A frozen object does
    not change until a Clear, because the children have adopted its messages. Whether a message is
    displaced depends on its key and its source alone, so all descendants of the source agree which
    of them has it.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from ...protocol.errors import NotFoundError, Reason, StaleRouteError
from ...protocol.limits import LOGICAL_PARTITIONS
from ...protocol.offsets import AckedOffsets, Range
from ...protocol.parked import (
    RETRIED,
    Adopt,
    AdoptedKey,
    AncestorNotified,
    AncestorReleased,
    Clear,
    DeadLetterKey,
    Edit,
    EditedMessage,
    FailAgain,
    Failure,
    Fault,
    Free,
    Freeze,
    Park,
    ParkChange,
    ParkKey,
    ParkState,
    Redrive,
    Shift,
    Unpark,
    is_loose,
)
from .failure_ranges import UNKNOWN, FaultTable, Mark
from .parked_key import (
    NO_LOGICAL_PARTITION,
    MarkedRow,
    MessageRef,
    ParkedKey,
    clip_marks,
    count_messages,
    decode_image,
    decode_keys,
    decode_mark,
    encode_image,
    image_of_keys,
    is_released,
    logical_partition_of,
    select_sources,
)

Undo = Callable[[], object]
NextTry = tuple[int, int, int, int]
"""The number of tries, the source, the offset, and the retry time in milliseconds since 1970."""


_RESTORED_FIELDS = (
    "adopted_parents",
    "adoption_tokens",
    "children_notify_ancestors",
    "frozen",
    "offsets_for_children",
    "partly_adopted_parents",
    "retaining_ancestors",
)


class Parked:
    """
    Everything that a group has parked on a partition.

    Args:
        logical_partitions: the range of the partition.
    """

    __slots__ = (
        "_faults",
        "_keys",
        "adopted_parents",
        "adoption_tokens",
        "children_notify_ancestors",
        "frozen",
        "logical_partitions",
        "messages",
        "partition_id",
        "offsets_for_children",
        "retaining_ancestors",
        "partly_adopted_parents",
        "version",
    )

    def __init__(
        self, partition_id: int, logical_partitions: Range = (0, LOGICAL_PARTITIONS)
    ) -> None:
        self.partition_id = partition_id
        self.logical_partitions = logical_partitions
        self._keys: dict[ParkKey, ParkedKey] = {}
        self._faults = FaultTable()
        self.messages = 0
        self.frozen = False
        self.adopted_parents: set[int] = set()
        """The parents whose parked messages have been completely adopted."""
        self.adoption_tokens: dict[int, int] = {}
        """Maps each parent to the token of the owner that adopted from it, if known. A later owner
        must adopt again, because the parent may have been reset and have parked messages again.
        """
        self.offsets_for_children: dict[int, int] = {}
        """Maps each logical partition, or NO_LOGICAL_PARTITION, to the offset of this partition
        from which children still need messages after a reset of this partition.
        """
        self.retaining_ancestors: set[int] = set()
        """The ancestors that retain messages which were adopted here, until they are notified that
        these are no longer needed.
        """
        self.partly_adopted_parents: set[int] = set()
        """The parents whose parked messages are partly adopted. Either the owner is still adopting
        them, or it stopped before it had adopted all of them.
        """
        self.children_notify_ancestors = False
        """True if children keep messages that they adopted before a reset. They, and not the owner
        of this partition, then notify the `retaining_ancestors`.
        """
        self.version = 1
        """Incremented by each change that was not requested by the owner. In memory only."""

    def __bool__(self) -> bool:
        return (
            self.left_to_children
            or self.frozen
            or bool(self.adopted_parents)
            or self.children_notify_ancestors
        )

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._keys)

    @property
    def retrying_messages(self) -> int:
        """The number of messages that wait for a retry."""
        return sum(
            parked.messages for key, parked in self._keys.items() if isinstance(key, int) and key
        )

    def get(self, key: ParkKey) -> ParkedKey | None:
        """Return the parked messages of a key, or None if it is not parked."""
        return self._keys.get(key)

    def is_redriving_message(self, ref: MessageRef) -> bool:
        """Return True if a message is parked here, and its key is being redriven."""
        keys = () if self.frozen else self._keys.values()
        return any(key.state is ParkState.REDRIVING and key.contains(ref) for key in keys)

    @property
    def has_redriving_keys(self) -> bool:
        """True if a key is being redriven here."""
        return not self.frozen and any(
            key.state is ParkState.REDRIVING for key in self._keys.values()
        )

    @property
    def left_to_children(self) -> bool:
        """True if the owners of children must fetch something once the partition is drained: either
        parked messages or the list of ancestors that they must notify.
        """
        return bool(self._keys or self.retaining_ancestors or self.offsets_for_children)

    @property
    def owner_version(self) -> int:
        """The version in the answers to the owner, from which it notices changes that it did not
        request. It is 0 unless something is parked, kept for children, or was changed in this way.
        """
        return self.version if self.left_to_children or self.version > 1 else 0

    @property
    def keeps_for_children(self) -> bool:
        """True if messages are kept for children, which report when they no longer need them."""
        return bool(self.offsets_for_children) or (self.frozen and bool(self._keys))

    def set_retry_times(self, tries: Iterable[NextTry]) -> Undo:
        """Record when messages that wait for retry are retried. Return a function that undoes
        it.
        """
        undos = [
            parked.set_retry_time((source, offset), retry_at_ms)
            for key, source, offset, retry_at_ms in tries
            if is_loose(key) and (parked := self._keys.get(key)) is not None
        ]
        return partial(_undo_all, undos)

    def clear_retry_times(self) -> Undo:
        """Forget the times of next tries, because a new owner retries waiting messages at once.
        Return a function that undoes it.
        """
        return partial(_undo_all, [each.clear_retry_times() for each in self._keys.values()])

    def clear_owner_tokens(self) -> None:
        """Record, in memory, that the owner has released the partition and no longer handles any of
        the parked messages.
        """
        for parked in self._keys.values():
            parked.owner_token = 0

    def lowest_own_offset(self) -> int | None:
        """Return the lowest offset of this partition that is parked here or kept for children, or
        None if there is none.
        """
        offset_ranges = (
            parked.offsets_by_source.get(self.partition_id) for parked in self._keys.values()
        )
        return min(
            (*(each.first for each in offset_ranges if each), *self.offsets_for_children.values()),
            default=None,
        )

    def unneeded_ancestors(self) -> tuple[int, ...]:
        """Return the retaining ancestors that no longer have messages parked here. The owner must
        notify them, unless the owners of children do.
        """
        if self.children_notify_ancestors:
            return ()
        needed_sources = {
            source for parked in self._keys.values() for source in parked.offsets_by_source
        }
        return tuple(sorted(self.retaining_ancestors - needed_sources))

    def token_for_rewrite(self, change: ParkChange, fence: int) -> int:
        """Return the token for the record in which carry-over rewrites a change: for an adoption,
        the token of the owner that made it, otherwise the fence.
        """
        return (
            self.adoption_tokens.get(change.parent, fence) if isinstance(change, Adopt) else fence
        )

    # ── changes ───────────────────────────────────────────────────────────────────────────────────
    def apply(
        self, change: ParkChange, *, at_ms: int, acked: AckedOffsets | None = None, token: int = 0
    ) -> Undo:
        """
        Apply a change, and return a function that undoes it. Applying a change again has no effect.

        Args:
            at_ms: when the change was written, by the broker's wall clock.
            acked: the group's progress, to which the parked messages are added; None if it already
                includes them. The undo does not change it.
            token: the group's fence when the change was written; 0 if unknown.
        """
        match change:
            case Park():
                return self._apply_park(change, ParkState.PARKED, at_ms, acked)
            case DeadLetterKey():
                return self._apply_park(change, ParkState.DEAD, at_ms, acked)
            case Shift():
                return self._apply_shift(change, at_ms)
            case Unpark():
                return self._apply_unpark(change)
            case Free():
                return self._free(change.key)
            case Redrive():
                return self._set_state(change.key, ParkState.REDRIVING)
            case Adopt():
                return self._apply_adoption(change, token)
            case Freeze():
                undo = self._restore_on_undo()
                self.frozen = True
                return undo
            case Clear():
                return self._apply_reset(change)
            case AncestorReleased():
                return self._remove_released(change)
            case AncestorNotified():
                return self._remove_ancestor(change.source)
            case Edit():
                return self._apply_edit(change.key, change.message)
            case FailAgain():
                return self._apply_repeated_failure(change)

    def _apply_park(
        self, change: Park | DeadLetterKey, state: ParkState, at_ms: int, acked: AckedOffsets | None
    ) -> Undo:
        known_key = self._keys.get(change.key)
        if known_key is None and is_loose(change.key) and not change.ranges:
            return _noop  # its messages are no longer parked
        undo_key = (
            self._create_key(change.key, at_ms)
            if known_key is None
            else self._set_state(change.key, None)
        )
        parked_key = self._keys[change.key]
        added_ranges: list[Range] = []
        for start, end in change.ranges:
            if acked is not None:
                acked.add(start, end)
            added_ranges += parked_key.add(self.partition_id, start, end)
        self.messages += count_messages(added_ranges)
        failed_ranges = added_ranges if change.failure is None else change.ranges
        undo_marks = self._record_failure(
            change.key, self.partition_id, failed_ranges, change.failure, at_ms
        )
        if change.failure is not None:
            parked_key.failure = change.failure
            parked_key.owner_token = change.token if isinstance(change, Park) else 0
        if change.failure is not None or state is ParkState.DEAD:
            parked_key.state = state

        def undo() -> None:
            undo_marks()
            for start, end in added_ranges:
                parked_key.remove(self.partition_id, start, end)
            self.messages -= count_messages(added_ranges)
            undo_key()

        return undo

    def _record_failure(
        self,
        key: ParkKey,
        source: int,
        ranges: Iterable[Range],
        failure: Failure | None,
        since_ms: int,
        *,
        keeps_since: bool = False,
    ) -> Undo:
        """Record how messages of a loose key failed. If `keeps_since` is true, keep the times at
        which they were parked.
        """
        if not is_loose(key):
            return _noop
        parked_key, ranges = self._keys[key], tuple(ranges)
        previous_marks = parked_key.failure_marks(source, ranges) or [
            MarkedRow(source, *range_, UNKNOWN) for range_ in ranges
        ]
        failed_at_ms = 0 if failure is None else failure.at_ms
        mark = Mark(since_ms, failed_at_ms, self._faults.intern_failure(failure))
        parked_key.set_failure_marks(
            row._replace(mark=mark._replace(since_ms=row.mark.since_ms) if keeps_since else mark)
            for row in previous_marks
        )
        self._prune_faults()
        return lambda: parked_key.set_failure_marks(previous_marks)

    def _prune_faults(self) -> None:
        """Forget the texts of failures if there are too many."""
        if not self._faults.is_over_limit:
            return
        failure_ranges = [
            each for parked in self._keys.values() for each in parked.failures.values()
        ]
        new_numbers = self._faults.prune(set().union(*(each.faults for each in failure_ranges)))
        for each in failure_ranges:
            each.renumber_faults(new_numbers)

    def _create_key(self, key: ParkKey, since_ms: int) -> Undo:
        self._keys[key] = ParkedKey(since_ms)
        return lambda: self._free(key)

    def _set_state(self, key: ParkKey, state: ParkState | None) -> Undo:
        """Set the state of a key, unless `state` is None. The returned function restores the state,
        failure, time and token.
        """
        parked_key = self._keys.get(key)
        if parked_key is None:
            return _noop
        previous = parked_key.state, parked_key.failure, parked_key.since_ms, parked_key.owner_token
        if state is not None:
            parked_key.state = state

        def undo() -> None:
            parked_key.state, parked_key.failure, parked_key.since_ms, parked_key.owner_token = (
                previous
            )

        return undo

    def _apply_unpark(self, change: Unpark) -> Undo:
        source, parked_key = change.source, self._keys.get(change.key)
        if parked_key is None:
            return _noop
        marks = parked_key.failure_marks(source, change.ranges)
        oldest, failure = next(parked_key.rows(0, 1), None), parked_key.failure
        removed_ranges = [
            range_
            for start, end in change.ranges
            for range_ in parked_key.remove(source, start, end)
        ]
        edits = parked_key.pop_edits(source, removed_ranges)
        self.messages -= count_messages(removed_ranges)
        is_key_removed = not parked_key.messages and is_loose(change.key)
        if is_key_removed:
            del self._keys[change.key]
        if not is_loose(change.key) and not parked_key.owner_token:
            # The failure is that of the oldest message; the next one has not been handled yet. An
            # owner that handles the key without a stored redrive has declared a crash beforehand.
            is_oldest_removed = oldest is not None and not parked_key.contains(oldest[:2])
            parked_key.failure = None if is_oldest_removed else failure

        def undo() -> None:
            parked_key.failure = failure
            if is_key_removed:
                self._keys[change.key] = parked_key
            for start, end in removed_ranges:
                parked_key.add(source, start, end)
            parked_key.set_failure_marks(marks)
            parked_key.edits |= edits
            self.messages += count_messages(removed_ranges)

        return undo

    def _apply_repeated_failure(self, change: FailAgain) -> Undo:
        parked_key = self._keys.get(change.key)
        offset_ranges = (
            None if parked_key is None else parked_key.offsets_by_source.get(change.source)
        )
        if parked_key is None or offset_ranges is None:
            return _noop
        ranges = [
            range_
            for start, end in change.ranges
            for range_ in offset_ranges.intersection(start, end)
        ]
        undo_state = self._set_state(change.key, None)
        undo_marks = self._record_failure(
            change.key, change.source, ranges, change.failure, 0, keeps_since=True
        )
        parked_key.failure = change.failure if ranges else parked_key.failure

        def undo() -> None:
            undo_marks()
            undo_state()

        return undo

    def _apply_shift(self, change: Shift, at_ms: int) -> Undo:
        source, parked_key = change.source, self._keys.get(change.key)
        if parked_key is None:
            return _noop
        marks = parked_key.failure_marks(source, change.ranges)
        removed_ranges = [
            range_
            for start, end in change.ranges
            for range_ in parked_key.remove(source, start, end)
        ]
        undos = [
            _noop
            if change.to in self._keys or not removed_ranges
            else self._create_key(change.to, at_ms)
        ]
        target = self._keys.get(change.to)
        added_ranges: list[Range] = []
        undo_marks: Undo = _noop
        if target is not None:
            undos.append(self._set_state(change.to, None))
            added_ranges = [
                range_ for start, end in removed_ranges for range_ in target.add(source, start, end)
            ]
            undo_marks = self._record_failure(
                change.to, source, removed_ranges, change.failure, at_ms
            )
            if change.failure is None:
                target.set_failure_marks(clip_marks(source, marks, removed_ranges))
            target.failure = change.failure or target.failure
            if change.to == RETRIED:
                target.state = ParkState.REDRIVING
        self.messages += count_messages(added_ranges) - count_messages(removed_ranges)
        is_key_removed = not parked_key.messages
        edits = parked_key.pop_edits(source, removed_ranges)
        if target is not None:
            target.edits |= edits
        if is_key_removed:
            del self._keys[change.key]

        def undo() -> None:
            parked_key.edits |= edits
            for ref in edits:
                if target is not None:
                    target.edits.pop(ref, None)
            if is_key_removed:
                self._keys[change.key] = parked_key
            undo_marks()
            for start, end in added_ranges:
                assert target is not None
                target.remove(source, start, end)
            for start, end in removed_ranges:
                parked_key.add(source, start, end)
            parked_key.set_failure_marks(marks)
            self.messages += count_messages(removed_ranges) - count_messages(added_ranges)
            _undo_all(undos)

        return undo

    def _free(self, key: ParkKey) -> Undo:
        parked_key = self._keys.pop(key, None)
        if parked_key is None:
            return _noop
        self.messages -= parked_key.messages

        def undo() -> None:
            self._keys[key] = parked_key
            self.messages += parked_key.messages

        return undo

    def _apply_adoption(self, change: Adopt, token: int) -> Undo:
        """Add the parked messages of a parent. Parent 0 stands for the state of this partition
        before a reset, or before the log was rewritten.
        """
        undos = [self._restore_on_undo()]
        undos += [
            self._adopt_key(key, is_own=not change.parent)
            for key in change.keys
            if key.key in self._keys or key.rows or not is_loose(key.key)
        ]
        if change.parent and not change.last:
            self.partly_adopted_parents = self.partly_adopted_parents | {change.parent}
        elif change.parent:
            self.partly_adopted_parents = self.partly_adopted_parents - {change.parent}
            self.adopted_parents = self.adopted_parents | {change.parent}
            if token:
                self.adoption_tokens = {**self.adoption_tokens, change.parent: token}
        ancestors = {change.parent, *change.sources} - {0, self.partition_id}
        self.retaining_ancestors = self.retaining_ancestors | ancestors
        self.offsets_for_children = self.offsets_for_children | dict(change.passed)
        self.children_notify_ancestors = (
            self.children_notify_ancestors or change.children_notify_ancestors
        )
        return partial(_undo_all, undos)

    def _adopt_key(self, key: AdoptedKey, *, is_own: bool) -> Undo:
        """Add parked messages of a key. If `is_own` is true, they were parked here before by the
        same owner; otherwise they come from a parent.
        """
        undos = [] if key.key in self._keys else [self._create_key(key.key, key.since_ms)]
        parked_key = self._keys[key.key]
        undos.append(self._set_state(key.key, None))
        if key.is_displaced and self._contains_key(key.key):
            previous = parked_key.displaced_sources
            undos.append(partial(setattr, parked_key, "displaced_sources", previous))
            parked_key.displaced_sources = previous.union(row[0] for row in key.rows)
        parked_key.state = key.state
        parked_key.failure = key.failure
        parked_key.since_ms = min(parked_key.since_ms, key.since_ms)
        parked_key.owner_token = key.token if is_own else 0
        for source, start, end in key.rows:
            new_ranges = parked_key.add(source, start, end)
            self.messages += count_messages(new_ranges)
            undos.append(partial(self._remove_offsets, parked_key, source, new_ranges))
            if is_loose(key.key):
                parked_key.set_failure_marks(
                    MarkedRow(source, *range_, UNKNOWN) for range_ in new_ranges
                )
        undos.append(self._adopt_marks(parked_key, key, keeps_tries=is_own))
        # An existing edit is newer: it was made here, or comes from an earlier replay.
        undos += [
            self._apply_edit(key.key, edit)
            for edit in key.edits
            if (edit.source, edit.offset) not in parked_key.edits
        ]
        return partial(_undo_all, undos)

    def _adopt_marks(self, parked_key: ParkedKey, key: AdoptedKey, *, keeps_tries: bool) -> Undo:
        if not is_loose(key.key):
            return _noop
        fault_numbers = [self._faults.intern(fault) for fault in key.faults]
        previous_marks = [
            previous_mark
            for mark in key.marks
            for previous_mark in parked_key.failure_marks(mark.source, ((mark.start, mark.end),))
        ]
        parked_key.set_failure_marks(
            decode_mark(mark, fault_numbers, keeps_tries=keeps_tries) for mark in key.marks
        )
        self._prune_faults()
        return lambda: parked_key.set_failure_marks(previous_marks)

    def _apply_edit(self, key: ParkKey, edit: EditedMessage) -> Undo:
        parked_key, ref = self._keys.get(key), (edit.source, edit.offset)
        if parked_key is None or not parked_key.contains(ref):
            return _noop
        previous = parked_key.edits.get(ref)
        parked_key.edits[ref] = edit

        def undo() -> None:
            if previous is None:
                parked_key.edits.pop(ref, None)
            else:
                parked_key.edits[ref] = previous

        return undo

    def _remove_released(self, change: AncestorReleased) -> Undo:
        undo = self._restore_on_undo("_keys", "messages")
        if self.frozen:
            kept_keys: dict[ParkKey, ParkedKey] = {}
            for key, part, logical_partition in self.parts():
                if not is_released(change, logical_partition):
                    kept_keys[key] = self._keys[key] if key in kept_keys else part
            self._keys = kept_keys
            self.messages = sum(parked.messages for parked in kept_keys.values())
        self.offsets_for_children = {
            logical_partition: offset
            for logical_partition, offset in self.offsets_for_children.items()
            if not is_released(change, logical_partition)
        }
        return undo

    def _remove_ancestor(self, ancestor: int) -> Undo:
        undo = self._restore_on_undo()
        self.retaining_ancestors = self.retaining_ancestors - {ancestor}
        return undo

    def _remove_offsets(self, parked_key: ParkedKey, source: int, ranges: list[Range]) -> None:
        for start, end in ranges:
            parked_key.remove(source, start, end)
        self.messages -= count_messages(ranges)

    def _restore_on_undo(self, *names: str) -> Undo:
        """Return a function that restores these fields and _RESTORED_FIELDS to their present
        values. Until then, they may be replaced but not changed in place.
        """
        previous = {name: getattr(self, name) for name in (*_RESTORED_FIELDS, *names)}

        def undo() -> None:
            for name, value in previous.items():
                setattr(self, name, value)

        return undo

    def _apply_reset(self, change: Clear) -> Undo:
        undo = self._restore_on_undo("_keys", "messages")
        self._keys = select_sources(self._keys, change.kept)
        self.messages = sum(parked.messages for parked in self._keys.values())
        self.frozen = False
        self.offsets_for_children = {}
        self.children_notify_ancestors = False
        self.adopted_parents = self.adopted_parents.intersection(change.kept)
        self.partly_adopted_parents = self.partly_adopted_parents.intersection(change.kept)
        self.adoption_tokens = {
            parent: token
            for parent, token in self.adoption_tokens.items()
            if parent in self.adopted_parents
        }
        if not (self.adopted_parents or self._keys):
            # Otherwise ancestors of the adopted parents must be notified, too.
            self.retaining_ancestors = set()
        return undo

    # ── views ─────────────────────────────────────────────────────────────────────────────────────
    def items(self) -> ItemsView[ParkKey, ParkedKey]:
        """Return every key with its parked messages."""
        return self._keys.items()

    def parts(self) -> Iterator[tuple[ParkKey, ParkedKey, int]]:
        """Yield every key with its parked messages, and the logical partition that decides which
        child adopts them. A key of which only some sources are displaced comes in two parts.
        """
        for key, parked_key in self._keys.items():
            if not self._contains_key(key):
                yield key, parked_key, NO_LOGICAL_PARTITION
            elif parked_key.displaced_sources.isdisjoint(parked_key.offsets_by_source):
                yield key, parked_key, logical_partition_of(key)
            else:
                displaced, others = parked_key.split_displaced()
                yield key, displaced, NO_LOGICAL_PARTITION
                if others.messages:
                    yield key, others, logical_partition_of(key)

    def _contains_key(self, key: ParkKey) -> bool:
        """Return True if the partition's range contains a key. No range contains loose ones."""
        start, end = self.logical_partitions
        return start <= logical_partition_of(key) < end

    def failure(self, mark: Mark) -> Failure | None:
        """Return the failure that a mark describes, or None if unknown."""
        return self._faults.failure(mark)

    def fault(self, number: int) -> Fault | None:
        """Return the fault with this number, or None if it was forgotten."""
        return self._faults.get(number)

    def find_edit(self, key: ParkKey, ref: MessageRef) -> EditedMessage | None:
        """
        Return the edited version of a parked message, or None if it was not edited.

        Raises:
            StaleRouteError: the children have adopted the message.
            NotFoundError: the message is not parked under this key.
        """
        if self.frozen:
            raise StaleRouteError(Reason.PARK_MOVED, partition_id=self.partition_id)
        parked_key = self._keys.get(key)
        if parked_key is None or not parked_key.contains(ref):
            raise NotFoundError(Reason.PARKED_MESSAGE_UNKNOWN, partition_id=ref[0], offset=ref[1])
        return parked_key.edits.get(ref)

    def list_edits(self) -> Iterator[tuple[ParkKey, EditedMessage]]:
        """Yield every edited message with its key."""
        for key, parked_key in self._keys.items():
            for ref in sorted(parked_key.edits):
                yield key, parked_key.edits[ref]

    # ── encoding ──────────────────────────────────────────────────────────────────────────────────
    def image(self) -> bytes:
        """Encode the whole state, or return b"" if nothing is parked."""
        if not self:
            return b""
        return encode_image(
            replace(
                image_of_keys(self._keys, self._faults.list_numbered()),
                frozen=self.frozen,
                adopted_parents=sorted(self.adopted_parents),
                retaining_ancestors=sorted(self.retaining_ancestors),
                adoption_tokens=sorted(self.adoption_tokens.items()),
                offsets_for_children=sorted(self.offsets_for_children.items()),
                partly_adopted_parents=sorted(self.partly_adopted_parents),
                children_notify_ancestors=self.children_notify_ancestors,
            )
        )

    @classmethod
    def of_image(
        cls, partition_id: int, image: bytes, logical_partitions: Range = (0, LOGICAL_PARTITIONS)
    ) -> Parked:
        """Decode the result of `image`, or raise msgspec.MsgspecError or ValueError."""
        parked = cls(partition_id, logical_partitions)
        if not image:
            return parked
        decoded = decode_image(image)
        parked._keys = decode_keys(decoded)
        parked.messages = sum(known.messages for known in parked._keys.values())
        parked.frozen = decoded.frozen
        parked.adopted_parents = set(decoded.adopted_parents)
        parked.adoption_tokens = dict(decoded.adoption_tokens)
        parked.retaining_ancestors = set(decoded.retaining_ancestors)
        parked.offsets_for_children = dict(decoded.offsets_for_children)
        parked.partly_adopted_parents = set(decoded.partly_adopted_parents)
        parked.children_notify_ancestors = decoded.children_notify_ancestors
        for key, edited in decoded.edits:
            parked._apply_edit(key, edited)
        parked._faults = FaultTable.from_items(decoded.faults)
        return parked


def _undo_all(undos: Sequence[Undo]) -> None:
    for undo in reversed(undos):
        undo()


def _noop() -> None:
    pass
