"""What a consumer group has parked on a partition: a fold over changes, the same in recovery and in service.  Pure.

    park_checks (raises, or gives what is to be written) ──▶ apply (at once; gives its undo) ──▶ the record in the log

Invariants
    A message that is parked is acked.  It is kept until an Unpark, or a Clear of everything.
    Of a key the messages of an ancestor come before those of a later partition, each by offset: the order in which they
    were sent.  A partition has a higher id than its ancestors.
    Folding a change a second time, after later ones, and then these, leads to the same state.  So each state of a key is
    said by a change, and none follows from the number of its messages.
    Frozen is final until a Clear: what the children have adopted does not change here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import msgspec

from ...protocol.errors import ParkedMessageUnknownError, ParkMovedError
from ...protocol.offsets import AckedOffsets, Range
from ...protocol.parked import (
    PARKED_PAGE_BYTES,
    PARKED_ROWS_MAX,
    RETRIED,
    Adopt,
    AdoptedKey,
    AncestorTold,
    Bury,
    Clear,
    Edit,
    EditedMessage,
    Failure,
    Free,
    Freeze,
    Park,
    ParkChange,
    ParkedKeyRow,
    ParkedOffsets,
    ParkKey,
    ParkState,
    Redrive,
    Shift,
    Unneeded,
    Unpark,
    is_loose,
)
from ...protocol.routing import logical_partition
from .offset_runs import OffsetRuns
from .parked_key import ParkedKey, Place, Row, message_count

KEY_ROW_BYTES = 24
"""About the length of a key's row, without the key."""
NEXT_TRIES_MAX = 1_000
"""Messages of one number of tries whose next try is known."""
Undo = Callable[[], None]


class Parked:
    """Everything that a group has parked on the partition `own`."""

    __slots__ = ("_keys", "adopted", "frozen", "messages", "own", "sources", "version")

    def __init__(self, own: int) -> None:
        self.own = own
        self._keys: dict[ParkKey, ParkedKey] = {}
        self.messages = 0
        self.frozen = False
        self.adopted: set[int] = set()
        """Parents whose parked messages are here, all of them."""
        self.sources: set[int] = set()
        """Ancestors that keep messages for the group because of what was adopted."""
        self.version = 1
        """Rises with each change that the owner has not asked for.  In memory only."""

    def __bool__(self) -> bool:
        return bool(self._keys or self.frozen or self.adopted or self.sources)

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._keys)

    @property
    def retrying(self) -> int:
        """Messages that wait for retry."""
        return sum(
            parked.messages for key, parked in self._keys.items() if isinstance(key, int) and key
        )

    def get(self, key: ParkKey) -> ParkedKey | None:
        """The parked messages of a key."""
        return self._keys.get(key)

    def redrives(self, place: Place) -> bool:
        """True if this message is parked here, and its key is being redriven."""
        keys = () if self.frozen else self._keys.values()
        return any(key.state is ParkState.REDRIVING and key.has(place) for key in keys)

    @property
    def seen_version(self) -> int:
        """What the owner compares: `version` while anything is parked, else 0."""
        return self.version if self._keys or self.sources or self.version > 1 else 0

    @property
    def dead(self) -> tuple[int, int]:
        """The number of dead keys, and of all dead letters."""
        counts = [
            (int(isinstance(key, bytes)), parked.messages)
            for key, parked in self._keys.items()
            if key in {None, RETRIED} or parked.state is ParkState.DEAD
        ]
        return sum(keys for keys, _ in counts), sum(messages for _, messages in counts)

    def note_next_tries(self, tries: Iterable[tuple[int, int, int, int]]) -> None:
        """Note when messages that wait for retry are tried: number of tries, source, offset, milliseconds since 1970."""
        for key, source, offset, at_ms in tries:
            parked = self._keys.get(key)
            known = parked is not None and parked.has((source, offset))
            if parked is not None and known and len(parked.next_tries) < NEXT_TRIES_MAX:
                parked.next_tries[source, offset] = at_ms

    def forget_next_tries(self) -> None:
        """Forget when messages are tried: a new owner tries at once what waits."""
        for parked in self._keys.values():
            parked.next_tries = {}

    def first_own(self) -> int | None:
        """The lowest parked offset of the partition itself, or None."""
        return min(
            (runs.first for parked in self._keys.values() if (runs := parked.pieces.get(self.own))),
            default=None,
        )

    def unneeded(self) -> tuple[int, ...]:
        """Ancestors that keep messages though none of them is parked here any more."""
        needed = {source for parked in self._keys.values() for source in parked.pieces}
        return tuple(sorted(self.sources - needed))

    # ── folding ───────────────────────────────────────────────────────────────────────────────────────
    def apply(self, change: ParkChange, *, at_ms: int, acked: AckedOffsets | None = None) -> Undo:
        """
        Make a change, which may be made already; returns a function that takes it back.

        Args:
            at_ms: when it was written, by the broker's calendar.
            acked: the group's progress, which gets the parked messages; None: it has them.  The undo leaves it alone.
        """
        match change:
            case Park():
                return self._park(change, ParkState.PARKED, at_ms, acked)
            case Bury():
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
                return self._adopt(change)
            case Freeze():
                self.frozen, before = True, self.frozen
                return lambda: setattr(self, "frozen", before)
            case Clear():
                return self._clear()
            case Unneeded():
                return self._leave(change)
            case AncestorTold():
                return self._release(change.source)
            case Edit():
                return self._edit(change.key, change.message)

    def _park(
        self, change: Park | Bury, state: ParkState, at_ms: int, acked: AckedOffsets | None
    ) -> Undo:
        parked = self._keys.get(change.key)
        undo = self._own_key(change.key, at_ms) if parked is None else self._set(change.key, None)
        parked = self._keys[change.key]
        added: list[Range] = []
        for start, end in change.ranges:
            if acked is not None:
                acked.add(start, end)
            added += parked.add(self.own, start, end)
        self.messages += message_count(added)
        if change.failure is not None:
            parked.failure = change.failure
        if change.failure is not None or state is ParkState.DEAD:
            parked.state = state

        def take_back() -> None:
            for start, end in added:
                parked.remove(self.own, start, end)
            self.messages -= message_count(added)
            undo()

        return take_back

    def _own_key(self, key: ParkKey, at_ms: int) -> Undo:
        self._keys[key] = ParkedKey(at_ms)
        return lambda: self._forget(key)

    def _forget(self, key: ParkKey) -> None:
        parked = self._keys.pop(key, None)
        if parked is not None:
            self.messages -= parked.messages

    def _set(self, key: ParkKey, state: ParkState | None) -> Undo:
        """Set the state of a key, if one is given; the undo restores state, failure and time."""
        parked = self._keys.get(key)
        if parked is None:
            return _nothing
        before = parked.state, parked.failure, parked.since_ms
        if state is not None:
            parked.state = state

        def take_back() -> None:
            parked.state, parked.failure, parked.since_ms = before

        return take_back

    def _unpark(self, change: Unpark) -> Undo:
        parked = self._keys.get(change.key)
        if parked is None:
            return _nothing
        gone = [
            part
            for start, end in change.ranges
            for part in parked.remove(change.source, start, end)
        ]
        edits = parked.take_edits(change.source, gone)
        self.messages -= message_count(gone)
        emptied = not parked.messages and is_loose(change.key)
        if emptied:
            del self._keys[change.key]

        def take_back() -> None:
            if emptied:
                self._keys[change.key] = parked
            for start, end in gone:
                parked.add(change.source, start, end)
            parked.edits |= edits
            self.messages += message_count(gone)

        return take_back

    def _shift(self, change: Shift, at_ms: int) -> Undo:
        source, parked = change.source, self._keys.get(change.key)
        if parked is None:
            return _nothing
        gone = [part for start, end in change.ranges for part in parked.remove(source, start, end)]
        undos = [
            _nothing if change.to in self._keys or not gone else self._own_key(change.to, at_ms)
        ]
        target = self._keys.get(change.to)
        added: list[Range] = []
        if target is not None:
            undos.append(self._set(change.to, None))
            added = [part for start, end in gone for part in target.add(source, start, end)]
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
            for start, end in added:
                assert target is not None
                target.remove(source, start, end)
            for start, end in gone:
                parked.add(source, start, end)
            self.messages += message_count(gone) - message_count(added)
            for undo in reversed(undos):
                undo()

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

    def _adopt(self, change: Adopt) -> Undo:
        undos: list[Undo] = []
        for key in change.keys:
            known = self._keys.get(key.key)
            undos.append(_nothing if known else self._own_key(key.key, key.since_ms))
            parked = self._keys[key.key]
            undos.append(self._set(key.key, None))
            parked.state, parked.failure = key.state, key.failure
            parked.since_ms = min(parked.since_ms, key.since_ms)
            for source, start, end in key.rows:
                new = parked.add(source, start, end)
                self.messages += message_count(new)
                undos.append(self._unadd(parked, source, new))
            # An edit that is known is newer: it was made here, or stands here since an earlier fold.
            undos += [
                self._edit(key.key, edited)
                for edited in key.edits
                if (edited.source, edited.offset) not in parked.edits
            ]
        if change.last and change.parent not in self.adopted and change.parent:
            self.adopted.add(change.parent)
            undos.append(lambda: self.adopted.discard(change.parent))

        sources = {change.parent, *change.sources} - {0, self.own} - self.sources
        self.sources |= sources

        def take_back() -> None:
            self.sources -= sources
            for undo in reversed(undos):
                undo()

        return take_back

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
        left = {
            key: self._keys.pop(key)
            for key in list(self._keys)
            if (
                change.start <= logical_partition(key) < change.end
                if isinstance(key, bytes) and key
                else change.loose
            )
        }
        count = sum(parked.messages for parked in left.values())
        self.messages -= count

        def take_back() -> None:
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

    def _clear(self) -> Undo:
        before = self._keys, self.messages, self.frozen, self.adopted, self.sources
        self._keys, self.messages, self.frozen, self.adopted, self.sources = (
            {},
            0,
            False,
            set(),
            set(),
        )

        def take_back() -> None:
            self._keys, self.messages, self.frozen, self.adopted, self.sources = before

        return take_back

    # ── views ─────────────────────────────────────────────────────────────────────────────────────────
    def key_rows(self, first: int) -> list[ParkedKeyRow]:
        """Keys from the `first`th on: up to PARKED_ROWS_MAX, and until they pass PARKED_PAGE_BYTES."""
        rows: list[ParkedKeyRow] = []
        size_bytes = 0
        for key, parked in islice(self._keys.items(), first, first + PARKED_ROWS_MAX):
            rows.append(ParkedKeyRow(key, parked.state, parked.messages))
            size_bytes += (len(key) if isinstance(key, bytes) else 0) + KEY_ROW_BYTES
            if size_bytes >= PARKED_PAGE_BYTES:
                break
        return rows

    def offsets(self, key: ParkKey, *, count: int, first: int = 0) -> ParkedOffsets:
        """Where parked messages of a key are, in up to PARKED_ROWS_MAX ranges: `count` of them, behind the first `first` ranges."""
        parked = self._keys.get(key)
        if parked is None:
            return ParkedOffsets(rows=[], messages=0)
        rows: list[Row] = []
        left = count
        for source, start, end in parked.rows(first, PARKED_ROWS_MAX):
            if left <= 0:
                break
            rows.append((source, start, min(end, start + left)))
            left -= end - start
        edited = parked.edited_in(rows)
        return ParkedOffsets(rows=rows, messages=parked.messages, edited=edited)

    def edited(self, key: ParkKey, place: Place) -> EditedMessage | None:
        """
        What an operator has put in the place of a parked message, if anything.

        Raises:
            ParkMovedError: the children have it.
            ParkedMessageUnknownError: it is not parked under this key.
        """
        if self.frozen:
            raise ParkMovedError(partition_id=self.own)
        parked = self._keys.get(key)
        if parked is None or not parked.has(place):
            raise ParkedMessageUnknownError(partition_id=place[0], offset=place[1])
        return parked.edits.get(place)

    def edits(self) -> Iterator[tuple[ParkKey, EditedMessage]]:
        """Every edited message, with its key."""
        for key, parked in self._keys.items():
            for place in sorted(parked.edits):
                yield key, parked.edits[place]

    def page(
        self, wanted: Callable[[ParkKey], bool], *, first: int = 0
    ) -> tuple[list[AdoptedKey], int | None]:
        """
        Of everything that is parked, the keys asked for, from the `first`th row on.

        A page has at most PARKED_ROWS_MAX rows, and ends behind the key that passes PARKED_PAGE_BYTES.  Edited messages
        come behind all rows, and count as a row each; a page ends before the one that passes PARKED_PAGE_BYTES, unless
        that is its first.

        Args:
            wanted: whether the messages of this key are asked for.

        Returns:
            The page, and the first row of the next one; None behind the last row.
        """
        return next(self._pages(wanted, first))

    def _pages(
        self, wanted: Callable[[ParkKey], bool], first: int
    ) -> Iterator[tuple[list[AdoptedKey], int | None]]:
        page: list[AdoptedKey] = []
        room, size_bytes, row = PARKED_ROWS_MAX, 0, 0
        for key, parked in self._keys.items():
            if not wanted(key):
                continue
            count = parked.row_count
            place = max(first - row, 0)
            while place < count:
                if room <= 0 or size_bytes >= PARKED_PAGE_BYTES:
                    yield page, row + place
                    page, room, size_bytes = [], PARKED_ROWS_MAX, 0
                part = tuple(parked.rows(place, room))
                adopted = AdoptedKey(key, parked.state, parked.since_ms, parked.failure, part)
                page.append(adopted)
                size_bytes += len(_encode(adopted))
                taken = max(len(part), 1)
                place += taken
                room -= taken
            row += count
        for key, edited in self.edits():
            if not wanted(key):
                continue
            if row >= first:
                more = len(edited.value) + len(edited.properties)
                if page and size_bytes + more > PARKED_PAGE_BYTES:
                    yield page, row
                    page, size_bytes = [], 0
                parked = self._keys[key]
                of_key = key, parked.state, parked.since_ms, parked.failure
                page.append(AdoptedKey(*of_key, (), (edited,)))
                size_bytes += more
            row += 1
        yield page, None

    def some_keys(self, first: int, *, retrying: bool) -> Iterator[tuple[ParkKey, ParkedKey]]:
        """Keys that operators know, from the `first`th on; `retrying`: with what waits for retry, by its tries."""
        known = (each for each in self._keys.items() if retrying or not isinstance(each[0], int))
        return islice(known, first, None)

    # ── as bytes ──────────────────────────────────────────────────────────────────────────────────────
    def image(self) -> bytes:
        """The whole state as bytes; b"" if there is none."""
        if not self:
            return b""
        keys = [
            (
                key,
                parked.state,
                parked.since_ms,
                parked.failure,
                [(source, *runs.packed()) for source, runs in parked.pieces.items()],
            )
            for key, parked in self._keys.items()
        ]
        edits = list(self.edits())
        known = (keys, self.frozen, sorted(self.adopted), sorted(self.sources))
        return _encode((*known, edits) if edits else known)

    @classmethod
    def of_image(cls, own: int, image: bytes) -> Parked:
        """The state of an image.  Raises msgspec.MsgspecError, ValueError."""
        parked = cls(own)
        if not image:
            return parked
        decoded = _decode(image)
        for key, state, since_ms, failure, pieces in decoded.keys:
            known = parked._keys[key] = ParkedKey(since_ms)
            known.state, known.failure = state, failure
            for source, starts, ends in pieces:
                known.pieces[source] = OffsetRuns.of_packed(starts, ends)
                known.messages += known.pieces[source].messages
            parked.messages += known.messages
        parked.frozen, parked.adopted = decoded.frozen, set(decoded.adopted)
        parked.sources = set(decoded.sources)
        for key, edited in decoded.edits:
            parked._edit(key, edited)
        return parked

    def changes(self) -> Iterator[ParkChange]:
        """
        Changes that make this state of an empty one, a page each; nothing else may happen between them.

        They are folded over what the log before them says, too, and then change nothing: so a log that ends between
        two of them has lost nothing.
        """
        for page, _ in self._pages(lambda _key: True, 0):
            if page:
                yield Adopt(0, tuple(page), last=False)
        for parent in sorted(self.adopted):
            yield Adopt(parent, (), last=True)
        if self.sources:
            yield Adopt(0, (), last=False, sources=tuple(sorted(self.sources)))
        for source in sorted(self.adopted - self.sources):
            yield AncestorTold(source)
        if self.frozen:
            yield Freeze()


class _ParkedImage(msgspec.Struct, frozen=True, array_like=True):
    keys: list[tuple[ParkKey, ParkState, int, Failure | None, list[tuple[int, bytes, bytes]]]]
    frozen: bool
    adopted: list[int]
    sources: list[int] = []
    edits: list[tuple[ParkKey, EditedMessage]] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_ParkedImage).decode


def _nothing() -> None:
    pass
