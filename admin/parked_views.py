"""What an admin tells of parked keys and messages, and which of them a caller asks for.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import EllipsisType

from msgspec import Struct

from ..protocol.errors import ConflictError, InvalidRequestError, NotFoundError, Reason
from ..protocol.ids import MAX_I64
from ..protocol.limits import KEY_BYTES_MAX
from ..protocol.message import Message
from ..protocol.parked import PARKED_ROWS_MAX, Failure, ParkedView, ParkState
from ..protocol.settings import flag_problems, is_within, refuse_call

AnyKey = bytes | EllipsisType | None
Row = tuple[int, int, int]
"""The partition, the first offset, and one past the last, of messages that follow one another."""


class ParkedKeyView(Struct, frozen=True, kw_only=True):
    """A key that a consumer group has parked on a partition."""

    partition_id: int
    key: bytes | None
    """b"": messages without a key; None: dead letters, of any key, or what waits for retry: see
    `tries`.
    """
    state: ParkState
    messages: int
    since_ms: int
    """When its first message was parked, by the broker's calendar."""
    failure: Failure | None
    """The last one: type, text, consumer, time and number of tries; of messages without an order
    that were chosen, theirs.
    """
    first_source: int
    """The partition that has the first message: this one, or an ancestor of it."""
    first_offset: int
    """Its offset there; -1: no message is left, and the consumer will free the key."""
    tries: int | None = None
    """These messages, of any key, wait for retry, and have failed so often; None: they do not wait
    for retry. 0: dead letters that were chosen to be handled again.
    """
    next_ms: int | None = None
    """When the next of them is tried again, milliseconds since 1970, as its consumer said; None:
    not known.
    """

    @property
    def is_loose(self) -> bool:
        """True for messages without an order: each has a failure of its own."""
        return not self.key

    @property
    def is_dead(self) -> bool:
        """True for dead letters: of any key, or all messages of a key that found no room among the
        parked ones.
        """
        return self.tries is None and (self.key is None or self.state is ParkState.DEAD)


class ParkedMessage(Struct, frozen=True, kw_only=True):
    """A parked message, as the partition has it where it was stored."""

    partition_id: int
    offset: int
    message: Message[bytes] | None
    problem: str = ""
    """Why there is no message, as when retention has removed it."""
    edited: bool = False
    """An operator has edited it: value and properties are the new ones."""
    failure: Failure | None = None
    """Its own last failure, of a dead letter or a message without a key; None: not known, or it
    waits behind one of its key.
    """
    since_ms: int | None = None
    """When it was set aside, by the broker's calendar, in the same way."""
    next_ms: int | None = None
    """When it is tried again, if it waits for retry, as its consumer said."""


class WantedKeys:
    """
    Which parked keys a caller asks for.

    Args:
        key: this key; None: dead letters; `...`: any.
        dead: True: dead letters alone, also those of `key` among dead letters of any key; False:
            all others.
        older_than_ms: parked for at least this time; of messages without an order each for itself.
        error: a text in the type or in the text of the last failure, in the same way.
        now_ms: the calendar, in milliseconds since 1970.

    Raises:
        InvalidRequestError: a value that cannot be.
    """

    def __init__(
        self,
        key: AnyKey,
        *,
        dead: bool | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
        now_ms: int,
    ) -> None:
        if key is not ...:
            checked_key(key)
        if older_than_ms is not None and not is_within(older_than_ms, 0, MAX_I64):
            raise InvalidRequestError(f"not a time in milliseconds: {older_than_ms!r:.40}")
        if dead is not None:
            refuse_call(flag_problems(dead=dead))
        if error is not None and not (isinstance(error, str) and error):
            raise InvalidRequestError(f"not a text of an error: {error!r:.80}")
        self.key = key
        self._dead = dead
        self._error = error
        self._until_ms = MAX_I64 if older_than_ms is None else now_ms - older_than_ms

    def matches(self, view: ParkedKeyView) -> bool:
        """True if the key is asked for, or messages of it may be among these."""
        if self._dead is not None and view.is_dead is not self._dead:
            return False
        if view.tries is not None and self.key is not ...:
            return False
        if self.key is not ... and self.key != view.key and self.inside(view) is None:
            return False
        if view.is_loose:  # the oldest of them is asked for, or none; their failures are their own
            return view.since_ms <= self._until_ms
        return self.chooses(view.since_ms, view.failure)

    def chooses(self, since_ms: int | None, failure: Failure | None) -> bool:
        """True if a key, or a message without an order, is asked for that failed so; what is not
        known is not chosen by it.
        """
        text = "" if failure is None else f"{failure.kind}: {failure.text}"
        if self._error is not None and (failure is None or self._error not in text):
            return False
        return self._until_ms == MAX_I64 or (since_ms is not None and since_ms <= self._until_ms)

    def picks(self, view: ParkedKeyView) -> bool:
        """True if only some messages of a view may be asked for, each for itself."""
        by_failure = self._error is not None or self._until_ms < MAX_I64
        return (view.is_loose and by_failure) or self.inside(view) is not None

    def inside(self, view: ParkedKeyView) -> bytes | None:
        """The key of the messages that are asked for among dead letters of any key; None: all
        messages of the view.
        """
        among = self._dead or (self._dead is None and self.key == b"")
        if among and view.key is None and view.tries is None and isinstance(self.key, bytes):
            return self.key
        return None


def view_of(partition_id: int, view: ParkedView) -> ParkedKeyView:
    """A broker's view of a parked key, as an admin tells it."""
    return ParkedKeyView(
        partition_id=partition_id,
        key=None if view.key_hex is None else bytes.fromhex(view.key_hex),
        state=view.state,
        messages=view.messages,
        since_ms=view.since_ms,
        failure=view.failure,
        first_source=view.first_source,
        first_offset=view.first_offset,
        tries=view.tries,
        next_ms=view.next_ms,
    )


def first_in_lineage(
    views: Sequence[ParkedKeyView], parents: Mapping[int, Sequence[int]]
) -> ParkedKeyView:
    """
    Of views of one key, the one with its oldest message: each other is on the same partition, or on
    one that continues it.

    Args:
        parents: of each partition that has data.

    Raises:
        NotFoundError: no message of the key is left.
        ConflictError: partitions that do not follow each other have it, as of a
            best_tried subject.
    """
    left = [view for view in views if view.first_offset >= 0]
    if not left:
        raise NotFoundError(Reason.PARKED_KEY_UNKNOWN)
    holders = sorted({view.partition_id for view in left})
    for earlier, later in pairwise(holders):
        if earlier not in _ancestors(later, parents):
            ids = ", ".join(map(str, holders))
            raise ConflictError(
                Reason.PARKED_KEY_AMBIGUOUS,
                f"the key is parked on partitions {ids}, and none of them comes first",
                partition_ids=ids,
            )
    return min(left, key=lambda view: (view.first_source, view.first_offset))


def _ancestors(partition_id: int, parents: Mapping[int, Sequence[int]]) -> set[int]:
    ancestors: set[int] = set()
    left = list(parents.get(partition_id, ()))
    while left:
        each = left.pop()
        if each not in ancestors:
            ancestors.add(each)
            left += parents.get(each, ())
    return ancestors


def checked_key(key: object) -> None:
    """Raises InvalidRequestError: it is no key."""
    if key is not None and not isinstance(key, bytes):
        raise InvalidRequestError(f"a key is bytes, or None for dead letters, not {key!r:.80}")
    if key is not None and len(key) > KEY_BYTES_MAX:
        raise InvalidRequestError(f"a key of {len(key)} bytes: at most {KEY_BYTES_MAX}")


def in_parts(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of parked messages in lists that one call takes."""
    return [
        list(rows[begin : begin + PARKED_ROWS_MAX])
        for begin in range(0, len(rows), PARKED_ROWS_MAX)
    ]
