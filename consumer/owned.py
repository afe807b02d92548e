"""What a consumer owns: its partitions, how far they are handled, and pauses of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from operator import attrgetter
from typing import NoReturn, SupportsIndex

from ..protocol.errors import InvalidRequestError, PartitionUnknownError, SeekRefusedError
from ..rpc.connections import Connections
from ..rpc.home import Home
from .assignments import Assignments
from .handling.stream import Stream
from .handling.workers import Workers
from .pulling.progress import Position
from .pulling.pull_client import PullClient
from .pulling.pull_gate import PAUSED
from .several import Several


@dataclass(frozen=True, slots=True)
class Assignment:
    """One partition that a consumer owns."""

    partition_id: int
    fencing_token: int
    outstanding: int
    """Messages pulled and not yet handled."""
    waiting_for: str
    """For people: what pulling waits for, as "messages", "handlers" or the text of an error."""
    missed: int = 0
    """Messages that retention by time removed before this consumer pulled them."""
    queue: int = 0
    """The number of its logic queue."""
    paused: bool = False
    """True between `pause` and `resume`."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a consumer is behind the ends of its partitions, as of its last pulls."""

    messages: int
    """Messages from the cursors to the ends."""
    seconds: float
    """The largest age of what is not acked, as of `Position.lag_s`; 0.0 if everything is acked."""


class Owned:
    """The part of a consumer that is about its partitions; of several consumers in one object, about those of all."""

    _home: Home
    _subject: str
    _group: str
    _dispatch: Workers | Stream | None
    _assignments: Assignments | None
    _several: Several | None
    _connections: Connections

    @property
    def _parts(self) -> list[Owned]:
        """The consumers that this object is made of."""
        if self._several is None:
            return [self]
        return [member for member in self._several.members if isinstance(member, Owned)]

    @property
    def assignment(self) -> list[Assignment]:
        """The partitions owned now, by id; none while it is not open here."""
        return [
            Assignment(
                client.partition_id,
                client.token,
                client.outstanding,
                client.waiting_for,
                client.missed,
                client.queue,
                client.paused,
            )
            for client in sorted(self._all_clients, key=attrgetter("partition_id"))
        ]

    @property
    def waiting_for(self) -> str:
        """
        For people, else "": who has suspended it, so that it is granted no partitions; and those whose messages it handles one
        at a time, because they may have ended the process of an earlier owner.
        """
        texts = [
            part._assignments.waiting_for
            for part in self._parts
            if part._assignments is not None and part._home.here
        ]
        return "; ".join(dict.fromkeys(text for text in texts if text))

    async def pause(self, *partition_ids: int) -> None:
        """
        Get no message of these partitions until `resume`, or until they are handed over; without ids, of all that are owned.

        They stay assigned.  A message that failed, and is tried again, and messages that run or are in hand are not held.

        Raises:
            PartitionUnknownError: a partition is not assigned now; nothing has changed.
            InvalidRequestError: a list, a text or an `Assignment` in place of the id of a partition.
            ClosedError, ForkedError, OtherLoopError: the consumer is not open here.
        """
        ids = partition_ids or tuple(client.partition_id for client in self._all_clients)
        self._steer(ids, paused=True)

    def _steer(self, partition_ids: tuple[int, ...], *, paused: bool) -> None:
        for part in self._parts:
            part._home.check()
        owned = {client.partition_id for client in self._all_clients}
        for partition_id in partition_ids:
            # An array says that it can be an index.
            if not (isinstance(partition_id, SupportsIndex) and isinstance(partition_id, Hashable)):
                raise InvalidRequestError(
                    "partitions are given by their ids, one by one, as pause(3, 5) or "
                    f"pause(*consumer.position), not {partition_id!r:.40}"
                )
            if partition_id not in owned:
                raise PartitionUnknownError(
                    f"partition {partition_id!r:.40} is not assigned to this consumer",
                    partition_id=partition_id,
                    subject=self._subject,
                )
        for part in self._parts:
            part._hold(partition_ids, paused=paused)

    def _hold(self, partition_ids: tuple[int, ...], *, paused: bool) -> None:
        """Pause or resume those of the partitions that this one owns."""
        clients, dispatch = self._clients, self._dispatch
        for partition_id in partition_ids:
            client = clients.get(partition_id)
            if client is None or dispatch is None:
                continue
            if paused and not client.paused:
                client.gate.hold(PAUSED)
                dispatch.pause(partition_id)
            elif not paused and client.paused:
                client.gate.let_go(PAUSED)
                dispatch.resume(partition_id)

    @property
    def _all_clients(self) -> list[PullClient]:
        """Those of all parts; two groups may each have one of the same partition."""
        return [client for part in self._parts for client in part._clients.values()]

    @property
    def _clients(self) -> dict[int, PullClient]:
        if self._assignments is None or not self._home.here:
            return {}
        return {client.partition_id: client for client in self._assignments.clients}

    @property
    def position(self) -> dict[int, Position]:
        """
        By id of each partition that is owned now: what is pulled and acked of it, and its lag.

        Where handlers of `on` for two groups have the same partition, that of the group that is further behind.
        """
        positions: dict[int, Position] = {}
        for client in self._all_clients:
            position, other = client.position, positions.get(client.partition_id)
            if other is None or position.cursor < other.cursor:
                positions[client.partition_id] = position
        return positions

    @property
    def lag(self) -> Lag:
        """The lag of all partitions that are owned now, together; those of two groups count twice."""
        positions = [client.position for client in self._all_clients]
        return Lag(
            sum(position.lag_messages for position in positions),
            max((position.lag_s for position in positions), default=0.0),
        )

    @property
    def throttled_ms(self) -> int:
        """For how long servers have let its calls wait for a quota; waits at the same time count together."""
        return sum(part._connections.throttled_ms for part in self._parts)

    def seek_to_time(self, *_where: object, **_to: object) -> NoReturn:
        """Refused, as `seek`.  Raises SeekRefusedError."""
        self.seek()

    def seek(self, *_where: object, **_to: object) -> NoReturn:
        """
        Refused: the progress of a group is one, and a member that moved it alone would break the order of others.

        Raises:
            SeekRefusedError: always; it says how an operator resets the group.
        """
        if self._several is not None:
            raise SeekRefusedError("seek of a consumer: its cursor is moved by acks alone")
        if not self._group:
            raise SeekRefusedError(
                f"seek of a broadcast consumer of {self._subject}: it begins at the latest message; a Reader begins anywhere"
            )
        raise SeekRefusedError(
            f"seek of a consumer of {self._subject} in group {self._group}: its cursor is moved by acks alone"
        )
