"""The consumer's reports on its connections to brokers: it asks the cluster about brokers that it
does not reach, and tries them.

`unreached.py` decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ..protocol.clock import Clock
from ..protocol.errors import KeylaneError
from ..protocol.frames import ListParked
from ..protocol.log_filter import LogFilter
from ..protocol.routing import Partition
from ..rpc.connections import Connections
from ..rpc.race import start_task
from .membership import Membership
from .pulling.pull_client import PullClient
from .unreached import NO_CONNECTION, UnreachedBrokers, patience_for

log = logging.getLogger("keylane.consumer")
_UNREACHED = (
    "%s gets no connection to broker group %s, of which the cluster hears: other members of its "
    "group get its partitions there, "
    "if they do"
)
_REACHED = "%s takes partitions of broker group %s again"
_AWAY = (
    "%s waits for broker group %s, of which the cluster does not hear any more either, or which "
    "has no partition of the subject"
)


class BrokerPlaces:
    """
    The brokers at which a consumer of an exclusive group has a place.

    Args:
        name: the name of the consumer, for log lines.
    """

    def __init__(
        self,
        name: str,
        group: str,
        *,
        membership: Membership,
        connections: Connections,
        clock: Clock,
        ttl_ms: int,
    ) -> None:
        self._name = name
        self._group = group
        self._membership = membership
        self._connections = connections
        self._clock = clock
        self._brokers = UnreachedBrokers(patience_for(ttl_ms))
        self._troubles = LogFilter()
        self._asking: asyncio.Task[None] | None = None

    @property
    def unreached(self) -> tuple[str, ...]:
        """Return the broker groups that are not reached, as heartbeats report them."""
        return self._brokers.told

    def look(self, clients: Sequence[PullClient]) -> None:
        """Check the consumer's partitions; this is called from time to time."""
        failing: dict[str, int] = {}
        reached: set[str] = set()
        for client in clients:
            since_ms = client.no_connection_since_ms
            if since_ms is not None:
                failing[client.broker_group] = max(since_ms, failing.get(client.broker_group, 0))
            elif client.has_connection:
                reached.add(client.broker_group)
        for name in self._brokers.note(failing, reached):
            self._tell(_REACHED, name)
            self._membership.nudge()
        asking = self._asking is not None and not self._asking.done()
        if not asking and (due := self._brokers.due(self._clock.boot_ms())):
            self._asking = start_task(self._ask(due), name="ask for places")

    def close(self) -> None:
        """Stop asking."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self, due: Sequence[str]) -> None:
        """Decide about brokers that are not reached, by the reports of the cluster on them."""
        try:
            partitions = await self._membership.partitions_by_broker()
        except KeylaneError as error:
            if line := self._troubles.met(error.message, self._clock.boot_ms()):
                log.info("%s cannot ask about brokers that it does not reach: %s", self._name, line)
            return
        if failures := self._troubles.over(self._clock.boot_ms()):
            log.info("%s can ask about brokers again, after %s", self._name, failures)
        # They are asked at once: where the network is cut, each broker that is asked costs a
        # time-out.
        await asyncio.gather(*(self._decide(name, partitions.get(name)) for name in due))

    async def _decide(self, name: str, partition: Partition | None) -> None:
        """Decide about one broker group; `partition` is one of the subject's there."""
        away = partition is None or partition.address is None
        # This is done even where its partitions try by themselves: the pause after their last try
        # may be longer than the broker has been back.
        reached = partition is not None and not away and await self._is_reached(partition)
        now_ms = self._clock.boot_ms()
        if name not in self._brokers.due(now_ms):
            return  # a partition has reached it meanwhile
        if not away and not reached:
            changed = not self._brokers.is_told(name)
            self._brokers.stay(name, now_ms)
            text = _UNREACHED
        else:
            changed = self._brokers.forget(name, now_ms)
            text = _AWAY if away else _REACHED
        if changed:
            self._tell(text, name)
            self._membership.nudge()

    async def _is_reached(self, partition: Partition) -> bool:
        """
        Return whether the broker answers on a data connection.

        The request changes nothing, and the refusal, because this is not an owner, is an answer: an
        open connection alone may lead nowhere.
        """
        assert partition.address is not None
        who = (int(partition.partition_id), self._group, self._membership.session, 0)
        try:
            await self._connections.broker_at(partition.address).call(ListParked(*who, first=0))
        except NO_CONNECTION:
            return False
        except KeylaneError:
            pass
        return True

    def _tell(self, text: str, name: str) -> None:
        log.warning(text, self._name, name)
