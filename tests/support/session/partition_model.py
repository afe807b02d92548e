"""A plain model of a broker's partition for one group: lists, sets, and no care for speed.

It refuses what a broker refuses, and fails at once when a session says what is not so: that a
message was handled that no handler had, that a key is free which has messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from keylane.protocol.errors import (
    FencedError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    OverloadedError,
    Reason,
)
from keylane.protocol.frames import Acked, Acquired, ParkedChanged, Released
from keylane.protocol.message import Message
from keylane.protocol.parked import (
    AncestorNotified,
    FailAgain,
    Free,
    Park,
    ParkedKeyRow,
    ParkOrDeadLetter,
    ParkState,
    Shift,
    Unpark,
    is_loose,
)

PARTITION_ID = 1
KEYS = (b"", b"a", b"b", b"c", b"d")


@dataclass
class ParkedModel:
    """A parked key."""

    state: ParkState
    offsets: list[int] = field(default_factory=list)
    token: int = 0
    """Of the owner whose handlers have the messages meanwhile."""


@dataclass
class AncestorModel:
    """A partition that keeps messages of a key, or loose ones, which this one has adopted."""

    key: bytes | None
    is_needed: bool = True
    knows: bool = False
    """True once it was told that it is not needed."""
    is_noted: bool = False
    """True once this partition's broker has stored that it was told."""
    loose: frozenset[int] = frozenset()
    """The loose messages that it keeps."""


class BatchModel:
    """A stored batch, whose messages are made when it is opened."""

    __slots__ = ("_keys", "end", "opened", "start")

    def __init__(self, keys: list[bytes], start: int, end: int) -> None:
        self._keys = keys
        self.start = start
        self.end = end
        self.opened = 0

    def open(self) -> list[Message[Any]]:
        self.opened += 1
        keys = self._keys
        return [
            Message("s", keys[offset], b"", offset, PARTITION_ID, 0)
            for offset in range(self.start, self.end)
        ]


class PartitionModel:
    """The partition, as its broker has it."""

    def __init__(self, *, ranges_max: int = 1_000, keys_max: int = 1_000) -> None:
        self.keys: list[bytes] = []
        """The key of each stored message."""
        self.is_sealed = False
        self.fence = 0
        self.is_released = True
        self.acked: set[int] = set()
        self.handled: set[int] = set()
        """What handlers have handled, by the truth of the tests."""
        self.skipped: set[int] = set()
        self.tries: dict[int, int] = {}
        self.begun: dict[int, int] = {}
        self.parked: dict[Any, ParkedModel] = {}
        self.version = 0
        self.unreadable: set[int] = set()
        """Messages that are damaged where they are stored, until they are repaired."""
        self.ancestors: dict[int, AncestorModel] = {}
        self.ranges_max = ranges_max
        self.keys_max = keys_max
        self.first_offset = 0
        """Messages below it are removed."""
        self.is_early = False
        """True if messages are acked before their handlers."""
        self.rejected: Callable[[int], bool] = lambda _: False
        """What the filter leaves out."""
        self.pulled_to = -1
        self.once_to = -1
        self.upto = 0

    # ── what the group owes ───────────────────────────────────────────────────────────────────────
    @property
    def cursor(self) -> int:
        cursor = 0
        while cursor in self.acked:
            cursor += 1
        return cursor

    def ranges_above(self, acked: set[int]) -> list[tuple[int, int]]:
        """The acked ranges above the cursor."""
        cursor, ranges = 0, []
        while cursor in acked:
            cursor += 1
        for offset in sorted(each for each in acked if each > cursor):
            if ranges and ranges[-1][1] == offset:
                ranges[-1] = ranges[-1][0], offset + 1
            else:
                ranges.append((offset, offset + 1))
        return ranges

    def where_parked(self, offset: int) -> list[Any]:
        return [key for key, parked in self.parked.items() if offset in parked.offsets]

    def is_settled(self, offset: int) -> bool:
        """True if later messages of its key need not wait for it."""
        if offset in self.handled or offset in self.skipped or self.rejected(offset):
            return True
        return any(is_loose(key) for key in self.where_parked(offset))

    # ── requests ──────────────────────────────────────────────────────────────────────────────────
    def check_token(self, token: int) -> None:
        if token != self.fence or self.is_released:
            raise FencedError(token=token, current_token=self.fence)

    def acquire(self, token: int) -> Acquired:
        if token < self.fence:
            raise FencedError(token=token, current_token=self.fence)
        if token > self.fence:
            if self.is_released:
                self.forget_suspects()
            self.upto = max(self.upto, min(self.once_to, self.pulled_to))
            self.once_to = max(self.once_to, self.pulled_to)
            self.pulled_to = 0
            self.fence = token
            self.is_released = False
        return Acquired(
            self.cursor,
            tuple(self.ranges_above(self.acked)),
            len(self.keys),
            self.is_sealed,
            tuple((offset, tries) for offset, tries in self.tries.items()),
            self.version,
            (),
            self.upto,
            tuple(pair for pair in self.begun.items() if pair[0] not in self.acked),
            (),
            self.once_to >= 0,
        )

    def forget_suspects(self) -> None:
        self.upto = 0
        self.once_to = self.pulled_to = -1
        self.begun = {}

    def release(self, token: int) -> Released:
        self.check_token(token)
        self.is_released = True
        self.forget_suspects()
        return Released()

    def batches(self, start: int, sizes: list[int]) -> list[BatchModel]:
        """Batches from `start` on, of the given sizes, as far as messages are stored."""
        if start < self.first_offset:
            raise OffsetOutOfRangeError(
                offset=start, first_offset=self.first_offset, next_offset=len(self.keys)
            )
        batches = []
        for size in sizes:
            end = min(start + size, len(self.keys))
            if start < end:
                batches.append(BatchModel(self.keys, start, end))
            start = end
        if batches:
            self.pulled_to = max(self.pulled_to, batches[-1].end)
        return batches

    def ack(self, token: int, ranges: Any, failed: Any, begun: Any) -> Acked:
        self.check_token(token)
        offsets = {offset for start, end in ranges for offset in range(start, end)}
        unhandled = {each for each in offsets - self.handled if not self.rejected(each)}
        assert self.is_early or not unhandled, f"acked, but never handled: {unhandled}"
        result = self.acked | offsets
        if len(self.ranges_above(result)) > self.ranges_max:
            raise OverloadedError("more acked ranges above the cursor", cursor=self.cursor)
        self.acked = result
        for offset, tries in failed:
            self.tries[offset] = max(tries, self.tries.get(offset, 0))
            self.begun.pop(offset, None)
        self.begun.update(begun)
        return Acked(self.cursor, self.version)

    # ── parked messages ───────────────────────────────────────────────────────────────────────────
    def rows(self) -> list[ParkedKeyRow]:
        return [
            ParkedKeyRow(key, parked.state, len(parked.offsets))
            for key, parked in self.parked.items()
        ]

    def adopt(self, source: int, key: bytes) -> None:
        """An ancestor keeps messages of a key, which is parked here too."""
        self.ancestors[source] = AncestorModel(key)
        self.parked[key] = ParkedModel(ParkState.PARKED)
        self.version = self.version or 1

    def adopt_loose(self, source: int, offsets: frozenset[int]) -> None:
        """An ancestor keeps loose messages, which are parked here."""
        self.ancestors[source] = AncestorModel(None, loose=offsets)

    def unneeded_ancestors(self) -> list[int]:
        return [
            source
            for source, ancestor in self.ancestors.items()
            if not (ancestor.is_needed or ancestor.is_noted)
        ]

    def leave(self, source: int) -> None:
        """The ancestor is told that it is not needed."""
        assert not self.ancestors[source].is_needed, f"{source} is needed, and is told otherwise"
        self.ancestors[source].knows = True

    def aside(self) -> list[tuple[int, int, int, int]]:
        return [
            (key, PARTITION_ID, offset, offset + 1)
            for key, parked in self.parked.items()
            if isinstance(key, int) and key
            for offset in parked.offsets
        ]

    def change(self, token: int, changes: Any) -> ParkedChanged:
        self.check_token(token)
        new_keys = {
            each.key
            for each in changes
            if type(each) is Park and isinstance(each.key, bytes) and each.key not in self.parked
        }
        if new_keys and len(self.parked) + len(new_keys) > self.keys_max:
            raise OverloadedError(Reason.PARK_FULL, "too many parked keys", limit=self.keys_max)
        known = {*self.parked, *(each.key for each in changes if _has_failure(each))}
        for change in changes:
            if isinstance(change, Park | ParkOrDeadLetter) and change.key not in known:
                raise InvalidRequestError("the key is not parked, and no failure is given")
        for change in changes:
            self._apply(change)
        return ParkedChanged(self.version)

    def _apply(self, change: Any) -> None:
        if isinstance(change, Park | ParkOrDeadLetter):
            self._park(change)
        elif isinstance(change, Unpark):
            self._remove(change.key, change.ranges, must_be_handled=True)
        elif isinstance(change, Shift):
            offsets = self._remove(change.key, change.ranges)
            if offsets:
                self._add(change.to, offsets)
        elif isinstance(change, Free):
            parked = self.parked.pop(change.key, None)
            assert parked is None or not parked.offsets, f"freed with {parked}"
            for ancestor in self.ancestors.values():
                ancestor.is_needed = ancestor.is_needed and ancestor.key != change.key
        elif isinstance(change, AncestorNotified):
            assert self.ancestors[change.source].knows, f"{change.source} was not told"
            self.ancestors[change.source].is_noted = True
        else:
            assert isinstance(change, FailAgain)

    def _add(self, key: Any, offsets: list[int]) -> ParkedModel:
        parked = self.parked.setdefault(key, ParkedModel(ParkState.PARKED))
        parked.offsets = sorted({*parked.offsets, *offsets})
        self.version = self.version or 1
        return parked

    def _park(self, change: Park | ParkOrDeadLetter) -> None:
        offsets = [offset for start, end in change.ranges for offset in range(start, end)]
        new = [offset for offset in offsets if offset not in self.acked]
        is_loose_part = is_loose(change.key) and bool(change.ranges)
        if not new and (change.failure is None or change.key not in self.parked or is_loose_part):
            return
        parked = self._add(change.key, new)
        if change.failure is not None and not (is_loose(change.key) and change.ranges):
            parked.state = ParkState.PARKED
            parked.token = getattr(change, "token", 0)
        self.acked |= set(new)
        for offset in new:
            self.begun.pop(offset, None)

    def _remove(self, key: Any, ranges: Any, *, must_be_handled: bool = False) -> list[int]:
        parked = self.parked.get(key)
        if parked is None:
            return []
        offsets = [each for start, end in ranges for each in range(start, end)]
        removed = [offset for offset in offsets if offset in parked.offsets]
        if must_be_handled:
            unhandled = {each for each in removed if each >= self.first_offset} - self.handled
            assert not unhandled, f"unparked, but never handled: {unhandled}"
        parked.offsets = [offset for offset in parked.offsets if offset not in removed]
        if is_loose(key) and not parked.offsets:
            del self.parked[key]
        if must_be_handled:
            for ancestor in self.ancestors.values():
                if ancestor.loose.intersection(removed):
                    ancestor.is_needed = any(map(self.where_parked, ancestor.loose))
        return removed

    def remove(self, first_offset: int) -> None:
        """Retention removes the messages below an offset."""
        for offset in range(self.first_offset, first_offset):
            if offset not in self.handled:
                self.skipped.add(offset)
            self.acked.add(offset)
        self.first_offset = max(self.first_offset, first_offset)

    # ── operators ─────────────────────────────────────────────────────────────────────────────────
    def redrive(self, key: Any) -> None:
        self.version += 1
        self.parked[key].state = ParkState.REDRIVING

    def retry(self, key: Any) -> None:
        """Choose the dead letters that there are now for another attempt."""
        self.version += 1
        self._add(0, self.parked.pop(key).offsets).state = ParkState.REDRIVING

    def skip(self, key: bytes) -> None:
        """Skip the first message of a parked key."""
        self.version += 1
        parked = self.parked[key]
        self.skipped.add(parked.offsets.pop(0))
        if not parked.offsets:
            parked.state = ParkState.REDRIVING


def _has_failure(change: Any) -> bool:
    return isinstance(change, Park | ParkOrDeadLetter) and change.failure is not None
