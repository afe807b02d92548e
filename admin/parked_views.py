"""Defines views of parked keys and messages, and the filter that selects them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import EllipsisType

from msgspec import Struct
from msgspec.structs import replace

from ..protocol.errors import ConflictError, InvalidRequestError, NotFoundError, Reason
from ..protocol.ids import MAX_I64
from ..protocol.limits import KEY_BYTES_MAX
from ..protocol.message import Message
from ..protocol.parked import PARKED_ROWS_MAX, Failure, ParkedView, ParkState
from ..protocol.routing import Partition, logical_partition
from ..protocol.settings import check_no_call_problems, flag_problems, is_within

KeySelector = bytes | EllipsisType | None
Row = tuple[int, int, int]
"""Consecutive messages as (partition id, first offset, end offset); the end is exclusive."""


class ParkedKeyView(Struct, frozen=True, kw_only=True):
    """The messages with one key that a consumer group has parked on one partition."""

    partition_id: int
    key: bytes | None
    """The order key. It is b"" for messages without a key. None stands for dead letters of any key
    or, if `tries` is set, for messages that are waiting to be retried.
    """
    state: ParkState
    messages: int
    since_ms: int
    """Time at which the first message was parked, in milliseconds since 1970 on the broker's
    clock.
    """
    failure: Failure | None
    """The last failure: its type, text, consumer and time, and the number of tries. For an order
    key, it is that of the oldest message, or None if that message has not been handled yet, because
    those before it were handled or skipped. For unordered messages, it is the last failure of any
    selected message.
    """
    first_source: int
    """The partition that stores the first message: this partition or one of its ancestors."""
    first_offset: int
    """Offset of the first message in its source partition; -1 if no message remains and the
    consumer is about to free the key.
    """
    tries: int | None = None
    """Number of failed tries of the messages, with any key, that are waiting to be retried. 0 for
    dead letters that are being redriven; None if the messages are not waiting to be retried.
    """
    next_ms: int | None = None
    """Time of the next retry, in milliseconds since 1970 on the consumer's clock; None if
    unknown.
    """
    being_adopted: bool = False
    """True if this partition has passed the messages to a child that does not have all of them yet.
    Until then they cannot be changed.
    """

    @property
    def is_loose(self) -> bool:
        """True for unordered messages, each of which has its own failure."""
        return not self.key

    @property
    def is_dead(self) -> bool:
        """True for dead letters: either those of any key, or a whole key that could not be parked
        because the group had reached its limit.
        """
        return self.tries is None and (self.key is None or self.state is ParkState.DEAD)


class ParkedPage(Struct, frozen=True, kw_only=True):
    """Some of the keys that a consumer group has parked on one partition."""

    keys: tuple[ParkedKeyView, ...]
    following: int | None = None
    """The number of the first key of the next page; None if this is the last one."""


class ParkedMessage(Struct, frozen=True, kw_only=True):
    """A parked message as its source partition stores it."""

    partition_id: int
    offset: int
    message: Message[bytes] | None
    problem: str = ""
    """The reason why `message` is None; for example, retention has removed it."""
    edited: bool = False
    """True if an operator has edited it; its value and properties are then the edited ones."""
    failure: Failure | None = None
    """The last failure of a dead letter or of a message without a key. None if unknown, or if the
    message is waiting behind an earlier one with its key.
    """
    since_ms: int | None = None
    """Time of parking, in milliseconds since 1970 on the broker's clock. None in the same cases as
    `failure`.
    """
    next_ms: int | None = None
    """Time of the next retry, in milliseconds since 1970 on the consumer's clock. None if the
    message is not waiting to be retried.
    """


class ParkedFilter:
    """
    Selects parked keys and, among unordered messages, single messages.

    Args:
        key: the order key; None selects dead letters, and `...` selects any key.
        dead: True selects only dead letters, including those of `key` among the dead letters of any
            key; False selects everything else.
        older_than_ms: minimum time since parking, in milliseconds; unordered messages are checked
            one by one.
        error: a substring of the type or text of the last failure; unordered messages are checked
            one by one.
        now_ms: the current time, in milliseconds since 1970.

    Raises:
        InvalidRequestError: an argument has the wrong type or is out of range.
    """

    def __init__(
        self,
        key: KeySelector,
        *,
        dead: bool | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
        now_ms: int,
    ) -> None:
        if key is not ...:
            validate_key(key)
        if older_than_ms is not None and not is_within(older_than_ms, 0, MAX_I64):
            raise InvalidRequestError(f"not a time in milliseconds: {older_than_ms!r:.40}")
        if dead is not None:
            check_no_call_problems(flag_problems(dead=dead))
        if error is not None and not (isinstance(error, str) and error):
            raise InvalidRequestError(f"not a text of an error: {error!r:.80}")
        self.key = key
        self._dead = dead
        self._error = error
        self._parked_until_ms = MAX_I64 if older_than_ms is None else now_ms - older_than_ms

    def matches(self, view: ParkedKeyView) -> bool:
        """Return True if the filter may select the view's key or some of its messages."""
        if self._dead is not None and view.is_dead is not self._dead:
            return False
        if view.tries is not None and self.key is not ...:
            return False
        if self.key is not ... and self.key != view.key and self.dead_letter_key(view) is None:
            return False
        if view.is_loose:  # the oldest message; failures are checked individually
            return view.since_ms <= self._parked_until_ms
        return self.selects(view.since_ms, view.failure)

    def selects(self, since_ms: int | None, failure: Failure | None) -> bool:
        """
        Return True if the filter selects a key or an unordered message with this parking time and
        failure.

        An unknown time or failure does not match a condition on it.
        """
        text = "" if failure is None else f"{failure.kind}: {failure.text}"
        if self._error is not None and (failure is None or self._error not in text):
            return False
        if self._parked_until_ms == MAX_I64:
            return True
        return since_ms is not None and since_ms <= self._parked_until_ms

    def selects_partially(self, view: ParkedKeyView) -> bool:
        """Return True if the filter may select only some of the view's messages."""
        by_message = self._error is not None or self._parked_until_ms < MAX_I64
        return (view.is_loose and by_message) or self.dead_letter_key(view) is not None

    def dead_letter_key(self, view: ParkedKeyView) -> bytes | None:
        """Return the key to look for among a view's dead letters of any key, or None if the keys of
        the messages do not matter.
        """
        among_dead = self._dead or (self._dead is None and self.key == b"")
        if among_dead and view.key is None and view.tries is None and isinstance(self.key, bytes):
            return self.key
        return None


def to_parked_view(partition_id: int, view: ParkedView) -> ParkedKeyView:
    """Convert the view of a parked key that a broker returned."""
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


def select_views_being_adopted(
    views: Sequence[ParkedKeyView], parent: Partition, waiting_children: Sequence[Partition]
) -> list[ParkedKeyView]:
    """
    Return those views of a sealed partition that a child will have, marked as being adopted.

    Args:
        waiting_children: those that have not adopted all of their messages yet.
    """

    def passes_to(child: Partition, key: bytes | None) -> bool:
        # Messages outside the parent's range go where its first logical partition goes.
        number = logical_partition(key) if key else parent.range_start
        if not parent.range_start <= number < parent.range_end:
            number = parent.range_start
        return child.range_start <= number < child.range_end

    return [
        replace(view, being_adopted=True)
        for view in views
        if any(passes_to(child, view.key) for child in waiting_children)
    ]


def find_oldest_view(
    views: Sequence[ParkedKeyView], parents: Mapping[int, Sequence[int]]
) -> ParkedKeyView:
    """
    Return the view with the oldest message; all `views` must have the same key.

    Args:
        parents: maps the id of every partition with data to its parents.

    Raises:
        NotFoundError: no message of the key remains.
        ConflictError: the key is parked on partitions that do not descend from one another, which
            can happen in a best_tried subject.
    """
    nonempty_views = [view for view in views if view.first_offset >= 0]
    if not nonempty_views:
        raise NotFoundError(Reason.PARKED_KEY_UNKNOWN)
    partition_ids = sorted({view.partition_id for view in nonempty_views})
    for earlier_id, later_id in pairwise(partition_ids):
        if earlier_id not in _find_ancestors(later_id, parents):
            ids_text = ", ".join(map(str, partition_ids))
            raise ConflictError(
                Reason.PARKED_KEY_AMBIGUOUS,
                f"the key is parked on partitions {ids_text}, and none of them comes first",
                partition_ids=ids_text,
            )
    return min(nonempty_views, key=lambda view: (view.first_source, view.first_offset))


def _find_ancestors(partition_id: int, parents: Mapping[int, Sequence[int]]) -> set[int]:
    ancestors: set[int] = set()
    pending_ids = list(parents.get(partition_id, ()))
    while pending_ids:
        ancestor = pending_ids.pop()
        if ancestor not in ancestors:
            ancestors.add(ancestor)
            pending_ids += parents.get(ancestor, ())
    return ancestors


def validate_key(key: object) -> None:
    """Check the type and size of an order key. Raises InvalidRequestError."""
    if key is not None and not isinstance(key, bytes):
        raise InvalidRequestError(
            f"a key is bytes or text, or None for dead letters, not {key!r:.80}"
        )
    if key is not None and len(key) > KEY_BYTES_MAX:
        raise InvalidRequestError(f"a key of {len(key)} bytes: at most {KEY_BYTES_MAX}")


def split_rows(rows: Sequence[Row]) -> list[list[Row]]:
    """Split rows of parked messages into lists that fit into one request."""
    return [
        list(rows[start : start + PARKED_ROWS_MAX])
        for start in range(0, len(rows), PARKED_ROWS_MAX)
    ]
