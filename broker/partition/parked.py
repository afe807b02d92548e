"""Holds the messages that a consumer group has parked on a partition. The same changes are applied
in recovery and in service. Pure.

    park_checks (raises, or returns the changes to write)
        ──▶ apply (immediately; returns its undo) ──▶ the record in the log

Invariants
    A parked message is acked, and stays parked until an Unpark or a Clear. A loose key exists only
    while it has messages. The messages of a key are in the order in which they were sent: by
    source, because a partition has a higher id than its ancestors, and then by offset. Replaying
    earlier changes, followed by all later ones, leads to the same state; therefore the state of a
    key is always set by a change, never derived from its number of messages. A frozen object does
    not change until a Clear, because the children have adopted its messages.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence
from functools import partial

from ...protocol.errors import NotFoundError, Reason, StaleRouteError
from ...protocol.offsets import AckedOffsets, Range
from ...protocol.parked import (
    RETRIED,
    Adopt,
    AdoptedKey,
    AncestorNotified,
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
    Unneeded,
    Unpark,
    is_loose,
)
from .failure_runs import UNKNOWN, Faults, Mark
from .parked_key import (
    MessageRef,
    ParkedKey,
    clip_marks,
    decode_image,
    encode_image,
    is_unneeded,
    keys_of,
    logical_partition_of,
    mark_of,
    message_count,
    restrict_keys,
)

Undo = Callable[[], None]
NextTry = tuple[int, int, int, int]
"""(number of tries, source, offset, time of the next try in milliseconds since 1970)"""


class Parked:
    """Everything that a group has parked on the partition with the id `own`."""

    __slots__ = (
        "_faults",
        "_keys",
        "adopted",
        "adopted_under",
        "children_tell",
        "frozen",
        "messages",
        "own",
        "passed",
        "sources",
        "taking",
        "version",
    )

    def __init__(self, own: int) -> None:
        self.own = own
        self._keys: dict[ParkKey, ParkedKey] = {}
        self._faults = Faults()
        self.messages = 0
        self.frozen = False
        self.adopted: set[int] = set()
        """Parents whose parked messages are completely adopted."""
        self.adopted_under: dict[int, int] = {}
        """Parent → the token of the owner that adopted from it, if known. After a reset of the
        parent, it may have parked messages again.
        """
        self.passed: dict[int, int] = {}
        """Logical partition, or NO_LOGICAL_PARTITION → the own offset from which children still
        need messages after a reset of this partition.
        """
        self.sources: set[int] = set()
        """Ancestors that keep messages because they were adopted from them."""
        self.taking: set[int] = set()
        """Parents that are partly adopted: by an owner that continues, or that ended before it was
        done.
        """
        self.children_tell = False
        """True if children keep messages that they adopted before a reset. They then notify the
        ancestors in `sources` instead of the owner.
        """
        self.version = 1
        """Rises with each change that was not requested by the owner. In memory only."""

    def __bool__(self) -> bool:
        return self.left_to_children or self.frozen or bool(self.adopted) or self.children_tell

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._keys)

    @property
    def retrying(self) -> int:
        """The number of messages that wait for retry."""
        return sum(
            parked.messages for key, parked in self._keys.items() if isinstance(key, int) and key
        )

    def get(self, key: ParkKey) -> ParkedKey | None:
        """Return the parked messages of a key, or None if it is not parked."""
        return self._keys.get(key)

    def redrives(self, ref: MessageRef) -> bool:
        """Return True if a message is parked here and its key is being redriven."""
        keys = () if self.frozen else self._keys.values()
        return any(key.state is ParkState.REDRIVING and key.has(ref) for key in keys)

    @property
    def redriving(self) -> bool:
        """True if a key is being redriven here."""
        return not self.frozen and any(
            key.state is ParkState.REDRIVING for key in self._keys.values()
        )

    @property
    def left_to_children(self) -> bool:
        """True if children must adopt something once the partition is drained: messages, or the
        list of ancestors to notify.
        """
        return bool(self._keys or self.sources or self.passed)

    @property
    def owner_version(self) -> int:
        """The version for owners to compare: `version` while anything is parked or kept for
        children, else 0.
        """
        return self.version if self.left_to_children or self.version > 1 else 0

    @property
    def keeps_for_children(self) -> bool:
        """True if messages are kept for children, which report when they no longer need them."""
        return bool(self.passed) or (self.frozen and bool(self._keys))

    def set_next_tries(self, tries: Iterable[NextTry]) -> Undo:
        """Record when messages that wait for retry are retried. Return a function that undoes
        it.
        """
        undos = [
            parked.set_next_try((source, offset), at_ms)
            for key, source, offset, at_ms in tries
            if is_loose(key) and (parked := self._keys.get(key)) is not None
        ]
        return partial(_undo_all, undos)

    def forget_next_tries(self) -> Undo:
        """Forget the times of next tries, because a new owner retries waiting messages at once.
        Return a function that undoes it.
        """
        return partial(_undo_all, [each.forget_next_tries() for each in self._keys.values()])

    def on_released(self) -> None:
        """Record that the owner has released the partition, and handles no messages any more. In
        memory only.
        """
        for parked in self._keys.values():
            parked.token = 0

    def first_own(self) -> int | None:
        """Return the lowest offset of this partition that is parked here or at children, or
        None.
        """
        runs = (parked.pieces.get(self.own) for parked in self._keys.values())
        return min((*(each.first for each in runs if each), *self.passed.values()), default=None)

    def unneeded(self) -> tuple[int, ...]:
        """Return the ancestors without parked messages here; the owner must notify them."""
        if self.children_tell:
            return ()
        needed = {source for parked in self._keys.values() for source in parked.pieces}
        return tuple(sorted(self.sources - needed))

    def token_of(self, change: ParkChange, fence: int) -> int:
        """Return the token with which a change must be written again: for an adoption that of the
        owner that made it, otherwise the fence.
        """
        return self.adopted_under.get(change.parent, fence) if isinstance(change, Adopt) else fence

    # ── changes ───────────────────────────────────────────────────────────────────────────────────
    def apply(
        self, change: ParkChange, *, at_ms: int, acked: AckedOffsets | None = None, token: int = 0
    ) -> Undo:
        """
        Apply a change; applying it again has no effect. Return a function that undoes it.

        Args:
            at_ms: when the change was written, by the broker's calendar.
            acked: the group's progress, to which the parked messages are added; None if it already
                includes them. The undo does not change it.
            token: the group's fence when the change was written; 0 if unknown.
        """
        match change:
            case Park():
                return self._park(change, ParkState.PARKED, at_ms, acked)
            case DeadLetterKey():
                return self._park(change, ParkState.DEAD, at_ms, acked)
            case Shift():
                return self._shift(change, at_ms)
            case Unpark():
                return self._unpark(change)
            case Free():
                return self._free(change.key)
            case Redrive():
                return self._set_state(change.key, ParkState.REDRIVING)
            case Adopt():
                return self._adopt(change, token)
            case Freeze():
                self.frozen, was_frozen = True, self.frozen
                return lambda: setattr(self, "frozen", was_frozen)
            case Clear():
                return self._clear(change)
            case Unneeded():
                return self._remove_unneeded(change)
            case AncestorNotified():
                return self._remove_source(change.source)
            case Edit():
                return self._edit(change.key, change.message)
            case FailAgain():
                return self._fail_again(change)

    def _park(
        self, change: Park | DeadLetterKey, state: ParkState, at_ms: int, acked: AckedOffsets | None
    ) -> Undo:
        parked = self._keys.get(change.key)
        if parked is None and is_loose(change.key) and not change.ranges:
            return _noop  # its messages are no longer parked
        undo_key = (
            self._create_key(change.key, at_ms)
            if parked is None
            else self._set_state(change.key, None)
        )
        parked = self._keys[change.key]
        added: list[Range] = []
        for start, end in change.ranges:
            if acked is not None:
                acked.add(start, end)
            added += parked.add(self.own, start, end)
        self.messages += message_count(added)
        failed = added if change.failure is None else change.ranges
        undo_marks = self._mark(change.key, self.own, failed, change.failure, at_ms)
        if change.failure is not None:
            parked.failure = change.failure
            parked.token = change.token if isinstance(change, Park) else 0
        if change.failure is not None or state is ParkState.DEAD:
            parked.state = state

        def undo() -> None:
            undo_marks()
            for start, end in added:
                parked.remove(self.own, start, end)
            self.messages -= message_count(added)
            undo_key()

        return undo

    def _mark(
        self,
        key: ParkKey,
        source: int,
        ranges: Iterable[Range],
        failure: Failure | None,
        since_ms: int,
        *,
        keeps_since: bool = False,
    ) -> Undo:
        """Record how messages of a loose key failed. With `keeps_since`, keep the times since when
        they are parked.
        """
        if not is_loose(key):
            return _noop
        parked, ranges = self._keys[key], tuple(ranges)
        previous = parked.marks(source, ranges) or [(source, *part, UNKNOWN) for part in ranges]
        at_ms = 0 if failure is None else failure.at_ms
        mark = Mark(since_ms, at_ms, self._faults.intern_failure(failure))
        parked.mark(
            (source, start, end, mark._replace(since_ms=known.since_ms) if keeps_since else mark)
            for _, start, end, known in previous
        )
        self._prune_faults()
        return lambda: parked.mark(previous)

    def _prune_faults(self) -> None:
        """Forget failure texts if there are too many."""
        if not self._faults.too_many:
            return
        runs = [each for parked in self._keys.values() for each in parked.failures.values()]
        new_numbers = self._faults.prune(set().union(*(each.faults for each in runs)))
        for each in runs:
            each.renumber_faults(new_numbers)

    def _create_key(self, key: ParkKey, at_ms: int) -> Undo:
        self._keys[key] = ParkedKey(at_ms)
        return lambda: self._remove_key(key)

    def _remove_key(self, key: ParkKey) -> None:
        parked = self._keys.pop(key, None)
        if parked is not None:
            self.messages -= parked.messages

    def _set_state(self, key: ParkKey, state: ParkState | None) -> Undo:
        """Set the state of a key, unless `state` is None. The returned undo restores the state,
        failure, time and token.
        """
        parked = self._keys.get(key)
        if parked is None:
            return _noop
        saved = parked.state, parked.failure, parked.since_ms, parked.token
        if state is not None:
            parked.state = state

        def undo() -> None:
            parked.state, parked.failure, parked.since_ms, parked.token = saved

        return undo

    def _unpark(self, change: Unpark) -> Undo:
        source, parked = change.source, self._keys.get(change.key)
        if parked is None:
            return _noop
        marks = parked.marks(source, change.ranges)
        removed = [
            part for start, end in change.ranges for part in parked.remove(source, start, end)
        ]
        edits = parked.pop_edits(source, removed)
        self.messages -= message_count(removed)
        key_removed = not parked.messages and is_loose(change.key)
        if key_removed:
            del self._keys[change.key]

        def undo() -> None:
            if key_removed:
                self._keys[change.key] = parked
            for start, end in removed:
                parked.add(source, start, end)
            parked.mark(marks)
            parked.edits |= edits
            self.messages += message_count(removed)

        return undo

    def _fail_again(self, change: FailAgain) -> Undo:
        parked = self._keys.get(change.key)
        runs = None if parked is None else parked.pieces.get(change.source)
        if parked is None or runs is None:
            return _noop
        ranges = [part for start, end in change.ranges for part in runs.within(start, end)]
        undo_state = self._set_state(change.key, None)
        undo_marks = self._mark(
            change.key, change.source, ranges, change.failure, 0, keeps_since=True
        )
        parked.failure = change.failure if ranges else parked.failure

        def undo() -> None:
            undo_marks()
            undo_state()

        return undo

    def _shift(self, change: Shift, at_ms: int) -> Undo:
        source, parked = change.source, self._keys.get(change.key)
        if parked is None:
            return _noop
        marks = parked.marks(source, change.ranges)
        removed = [
            part for start, end in change.ranges for part in parked.remove(source, start, end)
        ]
        undos = [
            _noop if change.to in self._keys or not removed else self._create_key(change.to, at_ms)
        ]
        target = self._keys.get(change.to)
        added: list[Range] = []
        undo_marks = _noop
        if target is not None:
            undos.append(self._set_state(change.to, None))
            added = [part for start, end in removed for part in target.add(source, start, end)]
            undo_marks = self._mark(change.to, source, removed, change.failure, at_ms)
            if change.failure is None:
                target.mark(clip_marks(source, marks, removed))
            target.failure = change.failure or target.failure
            if change.to == RETRIED:
                target.state = ParkState.REDRIVING
        self.messages += message_count(added) - message_count(removed)
        key_removed = not parked.messages
        edits = parked.pop_edits(source, removed)
        if target is not None:
            target.edits |= edits
        if key_removed:
            del self._keys[change.key]

        def undo() -> None:
            parked.edits |= edits
            for ref in edits:
                if target is not None:
                    target.edits.pop(ref, None)
            if key_removed:
                self._keys[change.key] = parked
            undo_marks()
            for start, end in added:
                assert target is not None
                target.remove(source, start, end)
            for start, end in removed:
                parked.add(source, start, end)
            parked.mark(marks)
            self.messages += message_count(removed) - message_count(added)
            _undo_all(undos)

        return undo

    def _free(self, key: ParkKey) -> Undo:
        parked = self._keys.pop(key, None)
        if parked is None:
            return _noop
        self.messages -= parked.messages

        def undo() -> None:
            self._keys[key] = parked
            self.messages += parked.messages

        return undo

    def _adopt(self, change: Adopt, token: int) -> Undo:
        undos: list[Undo] = []
        for key in change.keys:
            known = self._keys.get(key.key)
            if known is None and is_loose(key.key) and not key.rows:
                continue
            undos.append(_noop if known else self._create_key(key.key, key.since_ms))
            parked = self._keys[key.key]
            undos.append(self._set_state(key.key, None))
            parked.state = key.state
            parked.failure = key.failure
            parked.since_ms = min(parked.since_ms, key.since_ms)
            parked.token = 0 if change.parent else key.token
            for source, start, end in key.rows:
                new = parked.add(source, start, end)
                self.messages += message_count(new)
                undos.append(self._undo_add(parked, source, new))
                if is_loose(key.key):
                    parked.mark((source, *part, UNKNOWN) for part in new)
            undos.append(self._adopt_marks(parked, key, keeps_tries=not change.parent))
            # An existing edit is newer: it was made here, or comes from an earlier replay.
            undos += [
                self._edit(key.key, edited)
                for edited in key.edits
                if (edited.source, edited.offset) not in parked.edits
            ]
        if change.parent:
            undos.append(self._record_adoption(change, token))
        sources = {change.parent, *change.sources} - {0, self.own} - self.sources
        self.sources |= sources
        saved = self.passed, self.children_tell
        self.passed = self.passed | dict(change.passed)
        self.children_tell = self.children_tell or change.children_tell

        def undo() -> None:
            self.passed, self.children_tell = saved
            self.sources -= sources
            _undo_all(undos)

        return undo

    def _record_adoption(self, change: Adopt, token: int) -> Undo:
        parent, taking = change.parent, self.taking
        if not change.last:
            self.taking = taking | {parent}
            return lambda: setattr(self, "taking", taking)
        saved = self.adopted, self.adopted_under
        self.taking = taking - {parent}
        self.adopted = self.adopted | {parent}
        self.adopted_under = {**self.adopted_under, parent: token} if token else self.adopted_under

        def undo() -> None:
            self.taking = taking
            self.adopted, self.adopted_under = saved

        return undo

    def _adopt_marks(self, parked: ParkedKey, key: AdoptedKey, *, keeps_tries: bool) -> Undo:
        if not is_loose(key.key):
            return _noop
        numbers = [self._faults.intern(fault) for fault in key.faults]
        previous = [
            known
            for each in key.marks
            for known in parked.marks(each.source, ((each.start, each.end),))
        ]
        parked.mark(mark_of(each, numbers, keeps_tries=keeps_tries) for each in key.marks)
        self._prune_faults()
        return lambda: parked.mark(previous)

    def _edit(self, key: ParkKey, edited: EditedMessage) -> Undo:
        parked, ref = self._keys.get(key), (edited.source, edited.offset)
        if parked is None or not parked.has(ref):
            return _noop
        previous = parked.edits.get(ref)
        parked.edits[ref] = edited

        def undo() -> None:
            if previous is None:
                parked.edits.pop(ref, None)
            else:
                parked.edits[ref] = previous

        return undo

    def _remove_unneeded(self, change: Unneeded) -> Undo:
        keys = [
            key
            for key in self._keys
            if self.frozen and is_unneeded(change, logical_partition_of(key))
        ]
        removed = {key: self._keys.pop(key) for key in keys}
        count = sum(parked.messages for parked in removed.values())
        self.messages -= count
        passed = self.passed
        self.passed = {
            logical: low for logical, low in passed.items() if not is_unneeded(change, logical)
        }

        def undo() -> None:
            self.passed = passed
            self._keys.update(removed)
            self.messages += count

        return undo

    def _remove_source(self, source: int) -> Undo:
        if source not in self.sources:
            return _noop
        self.sources.discard(source)
        return lambda: self.sources.add(source)

    def _undo_add(self, parked: ParkedKey, source: int, ranges: list[Range]) -> Undo:
        def undo() -> None:
            for start, end in ranges:
                parked.remove(source, start, end)
            self.messages -= message_count(ranges)

        return undo

    def _clear(self, change: Clear) -> Undo:
        fields = set(self.__slots__) - {"own", "version", "_faults"}
        saved = {name: getattr(self, name) for name in fields}
        self._keys = restrict_keys(self._keys, change.kept)
        self.messages = sum(parked.messages for parked in self._keys.values())
        self.frozen = False
        self.passed = {}
        self.children_tell = False
        self.adopted = self.adopted.intersection(change.kept)
        self.taking = self.taking.intersection(change.kept)
        under = self.adopted_under.items()
        self.adopted_under = {parent: token for parent, token in under if parent in self.adopted}
        # Ancestors of the adopted parents must be notified, too.
        self.sources = set(self.sources) if self.adopted or self._keys else set()

        def undo() -> None:
            for name, value in saved.items():
                setattr(self, name, value)

        return undo

    # ── views ─────────────────────────────────────────────────────────────────────────────────────
    def items(self) -> ItemsView[ParkKey, ParkedKey]:
        """Return every key with its parked messages."""
        return self._keys.items()

    def failure(self, mark: Mark) -> Failure | None:
        """Return the failure that a mark describes, or None if unknown."""
        return self._faults.failure(mark)

    def fault(self, number: int) -> Fault | None:
        """Return the fault with this number, or None if it was forgotten."""
        return self._faults.get(number)

    def edited(self, key: ParkKey, ref: MessageRef) -> EditedMessage | None:
        """
        Return the edited version of a parked message, or None if it was not edited.

        Raises:
            StaleRouteError: the children have adopted it.
            NotFoundError: it is not parked under this key.
        """
        if self.frozen:
            raise StaleRouteError(Reason.PARK_MOVED, partition_id=self.own)
        parked = self._keys.get(key)
        if parked is None or not parked.has(ref):
            raise NotFoundError(Reason.PARKED_MESSAGE_UNKNOWN, partition_id=ref[0], offset=ref[1])
        return parked.edits.get(ref)

    def edits(self) -> Iterator[tuple[ParkKey, EditedMessage]]:
        """Yield every edited message with its key."""
        for key, parked in self._keys.items():
            for ref in sorted(parked.edits):
                yield key, parked.edits[ref]

    # ── encoding ──────────────────────────────────────────────────────────────────────────────────
    def image(self) -> bytes:
        """Encode the whole state, or return b"" if nothing is parked."""
        if not self:
            return b""
        ancestors = self.frozen, sorted(self.adopted), sorted(self.sources)
        more = self.adopted_under, self.passed, self.taking, self.children_tell
        return encode_image(self._keys, ancestors, list(self.edits()), self._faults.all(), more)

    @classmethod
    def of_image(cls, own: int, image: bytes) -> Parked:
        """Decode the result of `image`, or raise msgspec.MsgspecError or ValueError."""
        parked = cls(own)
        if not image:
            return parked
        decoded = decode_image(image)
        parked._keys = keys_of(decoded)
        parked.messages = sum(known.messages for known in parked._keys.values())
        parked.frozen = decoded.frozen
        parked.adopted = set(decoded.adopted)
        parked.adopted_under = dict(decoded.adopted_under)
        parked.sources = set(decoded.sources)
        parked.passed = dict(decoded.passed)
        parked.taking = set(decoded.taking)
        parked.children_tell = decoded.children_tell
        for key, edited in decoded.edits:
            parked._edit(key, edited)
        parked._faults = Faults.of(decoded.faults)
        return parked


def _undo_all(undos: Sequence[Undo]) -> None:
    for undo in reversed(undos):
        undo()


def _noop() -> None:
    pass
