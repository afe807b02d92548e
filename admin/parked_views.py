"""Views of parked keys and messages, and the filter by which a caller selects them. Pure."""

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
"""(partition id, first offset, end offset) of consecutive messages; the end is exclusive."""


class ParkedKeyView(Struct, frozen=True, kw_only=True):
    """The parked messages of one key, of one consumer group on one partition."""

    partition_id: int
    key: bytes | None
    """The order key; b"": messages without a key; None: dead letters of any key, or messages that
    wait for retry: see `tries`.
    """
    state: ParkState
    messages: int
    since_ms: int
    """Time when the first message was parked, milliseconds since 1970 by the broker's calendar."""
    failure: Failure | None
    """The last failure: type, text, consumer, time and number of tries; for a selection of messages
    without an order, the last failure among the selected ones.
    """
    first_source: int
    """Partition that stores the first message: this one, or an ancestor of it."""
    first_offset: int
    """Offset of the first message in its source; -1: no message is left, and the consumer will free
    the key.
    """
    tries: int | None = None
    """Number of failed tries of messages, of any key, that wait for retry; 0: dead letters that
    were chosen to be handled again; None: the messages do not wait for retry.
    """
    next_ms: int | None = None
    """Time of the next retry, milliseconds since 1970 by the consumer's calendar; None: not known.
    """

    @property
    def is_loose(self) -> bool:
        """True for messages without an order, each of which has a failure of its own."""
        return not self.key

    @property
    def is_dead(self) -> bool:
        """True for dead letters: of any key, or all messages of a key that did not fit among the
        parked ones.
        """
        return self.tries is None and (self.key is None or self.state is ParkState.DEAD)


class ParkedMessage(Struct, frozen=True, kw_only=True):
    """A parked message, as it is stored in its source partition."""

    partition_id: int
    offset: int
    message: Message[bytes] | None
    problem: str = ""
    """Reason why there is no message, for example that retention has removed it."""
    edited: bool = False
    """True if an operator has edited it: value and properties are the new ones."""
    failure: Failure | None = None
    """Last failure of a dead letter or of a message without a key; None: not known, or the message
    waits behind an earlier one of its key.
    """
    since_ms: int | None = None
    """Time of parking, milliseconds since 1970 by the broker's calendar; None as for `failure`."""
    next_ms: int | None = None
    """Time of the next retry, milliseconds since 1970 by the consumer's calendar; None: it does not
    wait for retry.
    """


class WantedKeys:
    """
    The filter of a call on parked keys.

    Args:
        key: this key; None: dead letters; `...`: any.
        dead: True: only dead letters, including those of `key` among dead letters of any key;
            False: all others.
        older_than_ms: minimum time since parking, in milliseconds; each message without an order is
            compared by itself.
        error: a substring of the type or the text of the last failure, compared in the same way.
        now_ms: the present time, milliseconds since 1970.

    Raises:
        InvalidRequestError: an argument has a wrong type or is out of its range.
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
        """True if the key is asked for, or if some messages of the view may be."""
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
        """True if the filter selects a key, or a message without an order, with this failure.

        A filter does not select what it cannot compare: an unknown time or an unknown failure.
        """
        text = "" if failure is None else f"{failure.kind}: {failure.text}"
        if self._error is not None and (failure is None or self._error not in text):
            return False
        return self._until_ms == MAX_I64 or (since_ms is not None and since_ms <= self._until_ms)

    def picks(self, view: ParkedKeyView) -> bool:
        """True if the filter may select only some messages of a view, each by itself."""
        by_failure = self._error is not None or self._until_ms < MAX_I64
        return (view.is_loose and by_failure) or self.inside(view) is not None

    def inside(self, view: ParkedKeyView) -> bytes | None:
        """Return the key to look for inside a view of dead letters of any key; None: the whole view
        is meant.
        """
        among = self._dead or (self._dead is None and self.key == b"")
        if among and view.key is None and view.tries is None and isinstance(self.key, bytes):
            return self.key
        return None


def view_of(partition_id: int, view: ParkedView) -> ParkedKeyView:
    """Convert a broker's view of a parked key."""
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
    Return the view, among views of one key, that has the oldest message.

    Args:
        parents: partition id → its parents, for every partition that has data.

    Raises:
        NotFoundError: no message of the key is left.
        ConflictError: partitions that are not in one line of descent have it, which is
            possible in a best_tried subject.
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
    """Check an order key as a caller gave it. Raises InvalidRequestError."""
    if key is not None and not isinstance(key, bytes):
        raise InvalidRequestError(f"a key is bytes, or None for dead letters, not {key!r:.80}")
    if key is not None and len(key) > KEY_BYTES_MAX:
        raise InvalidRequestError(f"a key of {len(key)} bytes: at most {KEY_BYTES_MAX}")


def chunks(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of parked messages in lists that one call takes."""
    return [
        list(rows[begin : begin + PARKED_ROWS_MAX])
        for begin in range(0, len(rows), PARKED_ROWS_MAX)
    ]
