"""Places that a sender chooses for its messages instead of the hash of their keys. Pure.

    place: a logical partition, or a logic queue ─▶ logical partition ─▶ executor

A logic queue is represented by the first logical partition of its range, which it keeps when it
moves. A message keeps its place while it is held, and when it leaves a partition for a newer route.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ..protocol.errors import ConflictError, InvalidRequestError, NotFoundError, Reason
from ..protocol.limits import LOGICAL_PARTITIONS
from ..protocol.routing import Route
from ..protocol.settings import whole


@dataclass(frozen=True, slots=True)
class LogicQueue:
    """
    A logic queue of a static subject, as a partitioner returns it.

    Raises:
        InvalidRequestError: the number is not a whole number.
    """

    number: int

    def __post_init__(self) -> None:
        if type(self.number) is int:
            return
        number = whole(self.number)
        if number is None:
            raise InvalidRequestError(
                f"queue is the number of a logic queue, not {self.number!r:.40}"
            )
        object.__setattr__(self, "number", number)


Place: TypeAlias = int | LogicQueue
Partitioner: TypeAlias = Callable[[bytes], Place]


def chosen_place(queue: int | None, partitioner: Partitioner | None, key: bytes) -> Place:
    """
    Return the place of a message: its `queue`, or the partitioner's answer for its key.

    Raises:
        InvalidRequestError: the queue is not a number, or the partitioner failed or did not return
            a place.
    """
    if queue is not None:
        return LogicQueue(queue)
    assert partitioner is not None
    try:
        place = partitioner(key)
    except Exception as error:
        raise InvalidRequestError(f"the partitioner failed: {error!r:.200}") from error
    if type(place) is LogicQueue or (type(place) is int and 0 <= place < LOGICAL_PARTITIONS):
        return place
    raise InvalidRequestError(
        f"a partitioner returns a logical partition (0 to {LOGICAL_PARTITIONS - 1}) or a "
        f"LogicQueue, not {place!r:.40}"
    )


class QueueStarts:
    """The first logical partition of each logic queue of a subject."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._route: Route | None = None
        self._starts: dict[int, int] = {}

    def follow(self, route: Route) -> None:
        """Take the queues from a route."""
        self._route = route
        self._starts = {each.queue: each.range_start for each in route.open_partitions()}

    def logical(self, place: Place) -> int:
        """
        Return the logical partition of a place. For a queue it is 0 before the first route, while
        all messages are held.

        Raises:
            ConflictError: the place is a queue, and the subject has none.
            NotFoundError: the subject has no such queue.
        """
        if not isinstance(place, LogicQueue):
            return place
        if self._route is None:
            return 0
        if not self._route.static:
            raise ConflictError(
                Reason.SUBJECT_NOT_STATIC,
                f"{self._subject!r} has no logic queues to send to",
                subject=self._subject,
            )
        start = self._starts.get(place.number)
        if start is None:
            raise NotFoundError(
                Reason.QUEUE_UNKNOWN,
                f"{self._subject!r} has no logic queue {place.number}",
                subject=self._subject,
                queue=place.number,
            )
        return start
