"""Destinations that a sender chooses for its messages, in place of the hash of their keys. Pure.

    destination: a logical partition, or a logic queue ─▶ logical partition ─▶ executor

A logic queue is represented by the first logical partition of its range, which does not change when
the queue moves. A message keeps its destination while it is held and when it leaves a partition.
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
    A logic queue of a static subject, as returned by a partitioner.

    Raises:
        InvalidRequestError: the number is not an integer.
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


Destination: TypeAlias = int | LogicQueue
Partitioner: TypeAlias = Callable[[bytes], Destination]


def choose_destination(
    queue: int | None, partitioner: Partitioner | None, key: bytes
) -> Destination:
    """
    Return the destination of a message: its `queue`, or the result of the partitioner for its key.

    Raises:
        InvalidRequestError: the queue is not a number, or the partitioner raised an exception or
            did not return a destination.
    """
    if queue is not None:
        return LogicQueue(queue)
    assert partitioner is not None
    try:
        destination = partitioner(key)
    except Exception as error:
        raise InvalidRequestError(f"the partitioner failed: {error!r:.200}") from error
    if type(destination) is LogicQueue or (
        type(destination) is int and 0 <= destination < LOGICAL_PARTITIONS
    ):
        return destination
    raise InvalidRequestError(
        f"a partitioner returns a logical partition (0 to {LOGICAL_PARTITIONS - 1}) or a "
        f"LogicQueue, not {destination!r:.40}"
    )


class QueueStarts:
    """The first logical partition of each logic queue of a subject."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._route: Route | None = None
        self._starts: dict[int, int] = {}

    def follow(self, route: Route) -> None:
        """Read the queues from a route."""
        self._route = route
        self._starts = {
            partition.queue: partition.range_start for partition in route.open_partitions()
        }

    def logical_partition(self, destination: Destination) -> int:
        """
        Return the logical partition of a destination. For a queue, this is 0 until the first route
        arrives; until then, all messages are held anyway.

        Raises:
            ConflictError: the destination is a queue, but the subject has no queues.
            NotFoundError: the subject has no such queue.
        """
        if not isinstance(destination, LogicQueue):
            return destination
        if self._route is None:
            return 0
        if not self._route.static:
            raise ConflictError(
                Reason.SUBJECT_NOT_STATIC,
                f"{self._subject!r} has no logic queues to send to",
                subject=self._subject,
            )
        start = self._starts.get(destination.number)
        if start is None:
            raise NotFoundError(
                Reason.QUEUE_UNKNOWN,
                f"{self._subject!r} has no logic queue {destination.number}",
                subject=self._subject,
                queue=destination.number,
            )
        return start
