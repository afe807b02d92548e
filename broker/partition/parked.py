"""The messages that a consumer group has parked on a partition: a fold over changes, the same in
recovery and in service. Pure.

    park_checks (raises, or returns what is to be written)
        ──▶ apply (at once; returns its undo) ──▶ the record in the log

Invariants
    A parked message is acked. It is kept until an Unpark or a Clear. A loose key exists while some
    of its messages are parked. The messages of a key are ordered as they were sent: those of an
    ancestor come before those of a later partition, and each partition's by offset. A partition has
    a higher id than its ancestors. Folding a change a second time after later ones, and then these
    again, leads to the same state. Therefore each state of a key is set by a change, and none
    follows from the number of its messages. Frozen is final until a Clear: what the children have
    adopted does not change here.
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
    AncestorTold,
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
    ParkedKey,
    Place,
    cut,
    decode_image,
    encode_image,
    keys_of,
    left_by,
    mark_of,
    message_count,
    parts_of,
    place_of,
)

Undo = Callable[[], None]
NextTry = tuple[int, int, int, int]
"""(number of tries, source, offset, time of the next try in milliseconds since 1970)."""


class Parked:
    """Everything that a group has parked on the partition `own`."""

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
        """Parents whose parked messages are all here."""
        self.adopted_under: dict[int, int] = {}
        """Parent → the token of the owner that adopted from it, if that is known. A later owner of
        the parent may have parked messages again.
        """
        self.passed: dict[int, int] = {}
        """Logical partition, or LOOSE_PLACE → own offset: children need messages from there on,
        although the partition was reset.
        """
        self.sources: set[int] = set()
        """Ancestors that keep messages for the group because of what was adopted."""
        self.taking: set[int] = set()
        """Parents of which a part is here: an owner is taking them over, or has ended before it had
        taken over the rest.
        """
        self.children_tell = False
        """True if children keep what they took over before a reset. They learn of `sources` here
        and notify these ancestors; no owner does.
        """
        self.version = 1
        """The version, which rises with each change that the owner has not asked for. In memory
        only.
        """

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
        """Return the parked messages of a key, or None."""
        return self._keys.get(key)

    def redrives(self, place: Place) -> bool:
        """Return True if this message is parked here and its key is being redriven."""
        keys = () if self.frozen else self._keys.values()
        return any(key.state is ParkState.REDRIVING and key.has(place) for key in keys)

    @property
    def redriving(self) -> bool:
        """True if some key is being redriven here."""
        return not self.frozen and any(
            key.state is ParkState.REDRIVING for key in self._keys.values()
        )

    @property
    def left_to_children(self) -> bool:
        """True if children take something over once the partition is drained: messages, or the list
        of ancestors that have to be notified.
        """
        return bool(self._keys or self.sources or self.passed)

    @property
    def seen_version(self) -> int:
        """The version that the owner compares: `version` while anything is parked or kept,
        else 0.
        """
        return self.version if self.left_to_children or self.version > 1 else 0

    @property
    def keeps_for_children(self) -> bool:
        """True if a child may report that it no longer needs something."""
        return bool(self.passed) or (self.frozen and bool(self._keys))

    def note_next_tries(self, tries: Iterable[NextTry]) -> Undo:
        """Note when messages that wait for retry are tried, in milliseconds since 1970. Return a
        function that undoes it.
        """
        undos = [
            parked.note_next_try((source, offset), at_ms)
            for key, source, offset, at_ms in tries
            if is_loose(key) and (parked := self._keys.get(key)) is not None
        ]
        return partial(_take_back, undos)

    def forget_next_tries(self) -> Undo:
        """Forget when messages are tried, because a new owner tries waiting messages at once.
        Return a function that undoes it.
        """
        return partial(_take_back, [each.forget_next_tries() for each in self._keys.values()])

    def given_back(self) -> None:
        """Note that the owner has released the partition: it has no messages with handlers. In
        memory only.
        """
        for parked in self._keys.values():
            parked.token = 0

    def first_own(self) -> int | None:
        """Return the lowest offset of the partition itself that is parked, here or at children, or
        None.
        """
        runs = (parked.pieces.get(self.own) for parked in self._keys.values())
        return min((*(each.first for each in runs if each), *self.passed.values()), default=None)

    def unneeded(self) -> tuple[int, ...]:
        """Return the ancestors of which no message is parked here any more: the owner has to notify
        them.
        """
        if self.children_tell:
            return ()
        needed = {source for parked in self._keys.values() for source in parked.pieces}
        return tuple(sorted(self.sources - needed))

    def token_of(self, change: ParkChange, fence: int) -> int:
        """Return the token of the record in which a change is written again: for an adoption, the
        token of its owner; otherwise the fence.
        """
        return self.adopted_under.get(change.parent, fence) if isinstance(change, Adopt) else fence

    # ── folding ───────────────────────────────────────────────────────────────────────────────────
    def apply(
        self, change: ParkChange, *, at_ms: int, acked: AckedOffsets | None = None, token: int = 0
    ) -> Undo:
        """
        Make a change, which may already be made. Return a function that undoes it.

        Args:
            at_ms: the time at which it was written, by the broker's calendar.
            acked: the group's progress, to which the parked messages are added; None if it already
                has them. The undo does not change it.
            token: the group's fence when the change was written; 0 if it is not known.
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
                return self._set(change.key, ParkState.REDRIVING)
            case Adopt():
                return self._adopt(change, token)
            case Freeze():
                self.frozen, before = True, self.frozen
                return lambda: setattr(self, "frozen", before)
            case Clear():
                return self._clear(change)
            case Unneeded():
                return self._leave(change)
            case AncestorTold():
                return self._release(change.source)
            case Edit():
                return self._edit(change.key, change.message)
            case FailAgain():
                return self._fail_again(change)

    def _park(
        self, change: Park | DeadLetterKey, state: ParkState, at_ms: int, acked: AckedOffsets | None
    ) -> Undo:
        parked = self._keys.get(change.key)
        if parked is None and is_loose(change.key) and not change.ranges:
            return _nothing  # its messages are gone
        undo = self._own_key(change.key, at_ms) if parked is None else self._set(change.key, None)
        parked = self._keys[change.key]
        added: list[Range] = []
        for start, end in change.ranges:
            if acked is not None:
                acked.add(start, end)
            added += parked.add(self.own, start, end)
        self.messages += message_count(added)
        failed = added if change.failure is None else change.ranges
        unmark = self._mark(change.key, self.own, failed, change.failure, at_ms)
        if change.failure is not None:
            parked.failure = change.failure
            parked.token = change.token if isinstance(change, Park) else 0
        if change.failure is not None or state is ParkState.DEAD:
            parked.state = state

        def take_back() -> None:
            unmark()
            for start, end in added:
                parked.remove(self.own, start, end)
            self.messages -= message_count(added)
            undo()

        return take_back

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
        """Note how messages of a key failed, if it is loose; with `keeps_since`, the time since
        which they are parked stays.
        """
        if not is_loose(key):
            return _nothing
        parked, ranges = self._keys[key], tuple(ranges)
        before = parked.marks(source, ranges) or [(source, *part, UNKNOWN) for part in ranges]
        at_ms = 0 if failure is None else failure.at_ms
        mark = Mark(since_ms, at_ms, self._faults.intern_failure(failure))
        parked.mark(
            (source, start, end, mark._replace(since_ms=known.since_ms) if keeps_since else mark)
            for _, start, end, known in before
        )
        self._spare_faults()
        return lambda: parked.mark(before)

    def _spare_faults(self) -> None:
        """Forget texts of failures if there are too many."""
        if not self._faults.too_many:
            return
        runs = [each for parked in self._keys.values() for each in parked.failures.values()]
        new_numbers = self._faults.prune(set().union(*(each.faults for each in runs)))
        for each in runs:
            each.renumber_faults(new_numbers)

    def _own_key(self, key: ParkKey, at_ms: int) -> Undo:
        self._keys[key] = ParkedKey(at_ms)
        return lambda: self._forget(key)

    def _forget(self, key: ParkKey) -> None:
        parked = self._keys.pop(key, None)
        if parked is not None:
            self.messages -= parked.messages

    def _set(self, key: ParkKey, state: ParkState | None) -> Undo:
        """Set the state of a key, if one is given. The undo restores state, failure, time and
        token.
        """
        parked = self._keys.get(key)
        if parked is None:
            return _nothing
        before = parked.state, parked.failure, parked.since_ms, parked.token
        if state is not None:
            parked.state = state

        def take_back() -> None:
            parked.state, parked.failure, parked.since_ms, parked.token = before

        return take_back

    def _unpark(self, change: Unpark) -> Undo:
        source, parked = change.source, self._keys.get(change.key)
        if parked is None:
            return _nothing
        marks = parked.marks(source, change.ranges)
        gone = [part for start, end in change.ranges for part in parked.remove(source, start, end)]
        edits = parked.take_edits(source, gone)
        self.messages -= message_count(gone)
        emptied = not parked.messages and is_loose(change.key)
        if emptied:
            del self._keys[change.key]

        def take_back() -> None:
            if emptied:
                self._keys[change.key] = parked
            for start, end in gone:
                parked.add(source, start, end)
            parked.mark(marks)
            parked.edits |= edits
            self.messages += message_count(gone)

        return take_back

    def _fail_again(self, change: FailAgain) -> Undo:
        parked = self._keys.get(change.key)
        runs = None if parked is None else parked.pieces.get(change.source)
        if parked is None or runs is None:
            return _nothing
        ranges = [part for start, end in change.ranges for part in runs.within(start, end)]
        undo = self._set(change.key, None)
        unmark = self._mark(change.key, change.source, ranges, change.failure, 0, keeps_since=True)
        parked.failure = change.failure if ranges else parked.failure

        def take_back() -> None:
            unmark()
            undo()

        return take_back

    def _shift(self, change: Shift, at_ms: int) -> Undo:
        source, parked = change.source, self._keys.get(change.key)
        if parked is None:
            return _nothing
        marks = parked.marks(source, change.ranges)
        gone = [part for start, end in change.ranges for part in parked.remove(source, start, end)]
        undos = [
            _nothing if change.to in self._keys or not gone else self._own_key(change.to, at_ms)
        ]
        target = self._keys.get(change.to)
        added: list[Range] = []
        unmark = _nothing
        if target is not None:
            undos.append(self._set(change.to, None))
            added = [part for start, end in gone for part in target.add(source, start, end)]
            unmark = self._mark(change.to, source, gone, change.failure, at_ms)
            if change.failure is None:
                target.mark(cut(source, marks, gone))
            target.failure = change.failure or target.failure
            if change.to == RETRIED:
                target.state = ParkState.REDRIVING
        self.messages += message_count(added) - message_count(gone)
        emptied = not parked.messages
        edits = parked.take_edits(source, gone)
        if target is not None:
            target.edits |= edits
        if emptied:
            del self._keys[change.key]

        def take_back() -> None:
            parked.edits |= edits
            for place in edits:
                if target is not None:
                    target.edits.pop(place, None)
            if emptied:
                self._keys[change.key] = parked
            unmark()
            for start, end in added:
                assert target is not None
                target.remove(source, start, end)
            for start, end in gone:
                parked.add(source, start, end)
            parked.mark(marks)
            self.messages += message_count(gone) - message_count(added)
            _take_back(undos)

        return take_back

    def _free(self, key: ParkKey) -> Undo:
        parked = self._keys.pop(key, None)
        if parked is None:
            return _nothing
        self.messages -= parked.messages

        def take_back() -> None:
            self._keys[key] = parked
            self.messages += parked.messages

        return take_back

    def _adopt(self, change: Adopt, token: int) -> Undo:
        undos: list[Undo] = []
        for key in change.keys:
            known = self._keys.get(key.key)
            if known is None and is_loose(key.key) and not key.rows:
                continue
            undos.append(_nothing if known else self._own_key(key.key, key.since_ms))
            parked = self._keys[key.key]
            undos.append(self._set(key.key, None))
            parked.state = key.state
            parked.failure = key.failure
            parked.since_ms = min(parked.since_ms, key.since_ms)
            parked.token = 0 if change.parent else key.token
            for source, start, end in key.rows:
                new = parked.add(source, start, end)
                self.messages += message_count(new)
                undos.append(self._unadd(parked, source, new))
                if is_loose(key.key):
                    parked.mark((source, *part, UNKNOWN) for part in new)
            undos.append(self._adopt_marks(parked, key, keeps_tries=not change.parent))
            # A known edit is newer: it was made here, or it has stood here since an earlier fold.
            undos += [
                self._edit(key.key, edited)
                for edited in key.edits
                if (edited.source, edited.offset) not in parked.edits
            ]
        if change.parent:
            undos.append(self._note_adopted(change, token))
        sources = {change.parent, *change.sources} - {0, self.own} - self.sources
        self.sources |= sources
        before = self.passed, self.children_tell
        self.passed = self.passed | dict(change.passed)
        self.children_tell = self.children_tell or change.children_tell

        def take_back() -> None:
            self.passed, self.children_tell = before
            self.sources -= sources
            _take_back(undos)

        return take_back

    def _note_adopted(self, change: Adopt, token: int) -> Undo:
        parent, taking = change.parent, self.taking
        if not change.last:
            self.taking = taking | {parent}
            return lambda: setattr(self, "taking", taking)
        before = self.adopted, self.adopted_under
        self.taking = taking - {parent}
        self.adopted = self.adopted | {parent}
        self.adopted_under = {**self.adopted_under, parent: token} if token else self.adopted_under

        def take_back() -> None:
            self.taking = taking
            self.adopted, self.adopted_under = before

        return take_back

    def _adopt_marks(self, parked: ParkedKey, key: AdoptedKey, *, keeps_tries: bool) -> Undo:
        if not is_loose(key.key):
            return _nothing
        numbers = [self._faults.intern(fault) for fault in key.faults]
        before = [
            known
            for each in key.marks
            for known in parked.marks(each.source, ((each.start, each.end),))
        ]
        parked.mark(mark_of(each, numbers, keeps_tries=keeps_tries) for each in key.marks)
        self._spare_faults()
        return lambda: parked.mark(before)

    def _edit(self, key: ParkKey, edited: EditedMessage) -> Undo:
        parked, place = self._keys.get(key), (edited.source, edited.offset)
        if parked is None or not parked.has(place):
            return _nothing
        before = parked.edits.get(place)
        parked.edits[place] = edited

        def take_back() -> None:
            if before is None:
                parked.edits.pop(place, None)
            else:
                parked.edits[place] = before

        return take_back

    def _leave(self, change: Unneeded) -> Undo:
        keys = [key for key in self._keys if self.frozen and left_by(change, place_of(key))]
        left = {key: self._keys.pop(key) for key in keys}
        count = sum(parked.messages for parked in left.values())
        self.messages -= count
        before = self.passed
        self.passed = {place: low for place, low in before.items() if not left_by(change, place)}

        def take_back() -> None:
            self.passed = before
            self._keys.update(left)
            self.messages += count

        return take_back

    def _release(self, source: int) -> Undo:
        if source not in self.sources:
            return _nothing
        self.sources.discard(source)
        return lambda: self.sources.add(source)

    def _unadd(self, parked: ParkedKey, source: int, ranges: list[Range]) -> Undo:
        def take_back() -> None:
            for start, end in ranges:
                parked.remove(source, start, end)
            self.messages -= message_count(ranges)

        return take_back

    def _clear(self, change: Clear) -> Undo:
        fields = set(self.__slots__) - {"own", "version", "_faults"}
        before = {name: getattr(self, name) for name in fields}
        self._keys = parts_of(self._keys, change.kept)
        self.messages = sum(part.messages for part in self._keys.values())
        self.frozen = False
        self.passed = {}
        self.children_tell = False
        self.adopted = self.adopted.intersection(change.kept)
        self.taking = self.taking.intersection(change.kept)
        under = self.adopted_under.items()
        self.adopted_under = {parent: token for parent, token in under if parent in self.adopted}
        # Ancestors above those that were adopted have to be notified, too.
        self.sources = set(self.sources) if self.adopted or self._keys else set()

        def take_back() -> None:
            for name, value in before.items():
                setattr(self, name, value)

        return take_back

    # ── views ─────────────────────────────────────────────────────────────────────────────────────
    def items(self) -> ItemsView[ParkKey, ParkedKey]:
        """Return every key with its parked messages."""
        return self._keys.items()

    def failure(self, mark: Mark) -> Failure | None:
        """Return the failure that a mark refers to."""
        return self._faults.failure(mark)

    def fault(self, number: int) -> Fault | None:
        """Return the fault for a number in a mark."""
        return self._faults.get(number)

    def edited(self, key: ParkKey, place: Place) -> EditedMessage | None:
        """
        Return the message with which an operator has replaced a parked message, or None.

        Raises:
            StaleRouteError: the children have it.
            NotFoundError: it is not parked under this key.
        """
        if self.frozen:
            raise StaleRouteError(Reason.PARK_MOVED, partition_id=self.own)
        parked = self._keys.get(key)
        if parked is None or not parked.has(place):
            raise NotFoundError(
                Reason.PARKED_MESSAGE_UNKNOWN, partition_id=place[0], offset=place[1]
            )
        return parked.edits.get(place)

    def edits(self) -> Iterator[tuple[ParkKey, EditedMessage]]:
        """Yield every edited message with its key."""
        for key, parked in self._keys.items():
            for place in sorted(parked.edits):
                yield key, parked.edits[place]

    # ── as bytes ──────────────────────────────────────────────────────────────────────────────────
    def image(self) -> bytes:
        """Return the whole state as bytes, or b"" if there is none."""
        if not self:
            return b""
        known = self.frozen, sorted(self.adopted), sorted(self.sources)
        more = self.adopted_under, self.passed, self.taking, self.children_tell
        return encode_image(self._keys, known, list(self.edits()), self._faults.all(), more)

    @classmethod
    def of_image(cls, own: int, image: bytes) -> Parked:
        """Return the state of an image, or raise msgspec.MsgspecError or ValueError."""
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


def _take_back(undos: Sequence[Undo]) -> None:
    for undo in reversed(undos):
        undo()


def _nothing() -> None:
    pass
