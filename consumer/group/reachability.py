"""Finds out which brokers a consumer cannot connect to although the metaserver hears from them, so
that the consumer's heartbeats can report them.

    the calls of a partition fail for `patience_ms` ─▶ does the metaserver hear from its broker?
        no  ─▶ wait again
        yes ─▶ report it in each heartbeat, so that other members get its partitions ─▶ check again
                  ─▶ reached, or no longer a broker of the subject: no longer reported

A broker that is down is unreachable for every consumer. It is not reported, so that partitions do
not move back and forth while it restarts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

from ...protocol.clock import Clock
from ...protocol.errors import KeylaneError
from ...protocol.frames import ListParked
from ...protocol.limits import UNREACHED_MAX
from ...protocol.log_filter import LogFilter
from ...protocol.routing import Partition
from ...rpc.connections import NO_CONNECTION, Connections
from ...rpc.race import start_task
from ..session_shell import SessionShell
from .membership import Membership

log = logging.getLogger("keylane.consumer")
PATIENCE_MS_MIN = 15_000
"""The minimum patience, in milliseconds, which is longer than the metaserver needs to notice that a
broker is silent (`broker_ttl_ms`).
"""
_UNREACHED = (
    "%s cannot connect to broker group %s, which reports to the cluster: other members of the "
    "group that can connect get its partitions there"
)
_REACHED = "%s accepts partitions of broker group %s again"
_DOWN = (
    "%s waits for broker group %s, which no longer reports to the cluster either, or no longer "
    "has a partition of the subject"
)


def patience_for(ttl_ms: int) -> int:
    """Return how many milliseconds a consumer keeps its grants on a broker that it cannot connect
    to.
    """
    return max(ttl_ms, PATIENCE_MS_MIN)


class UnreachedBrokers:
    """Decides which broker groups without a connection are reported. It does no I/O; all times are
    in milliseconds on the boot clock.
    """

    def __init__(self, patience_ms: int) -> None:
        self._patience_ms = patience_ms
        self._failing: dict[str, int] = {}
        """When the patience began, for each broker group that has partitions of the consumer."""
        self._next_check_ms: dict[str, int] = {}
        """The time of the next check of each reported broker group."""

    @property
    def reported(self) -> tuple[str, ...]:
        """The broker groups that heartbeats report as unreachable."""
        return tuple(sorted(self._next_check_ms))[:UNREACHED_MAX]

    def update_connections(self, failing: Mapping[str, int], reached: Collection[str]) -> list[str]:
        """
        Record which of the consumer's partitions have a connection.

        Args:
            failing: the time since which no partition has had a connection, by broker group.
            reached: the broker groups with a partition that has a connection.

        Returns:
            The broker groups that are no longer reported.
        """
        self._failing = {
            name: max(since_ms, self._failing.get(name, since_ms))
            for name, since_ms in failing.items()
            if name not in reached
        }
        recovered = sorted(self._next_check_ms.keys() & set(reached))
        for name in recovered:
            del self._next_check_ms[name]
        return recovered

    def find_due(self, now_ms: int) -> list[str]:
        """Return the broker groups whose state the caller should now look up at the metaserver."""
        due_brokers = {
            name
            for name, since_ms in self._failing.items()
            if name not in self._next_check_ms and now_ms - since_ms >= self._patience_ms
        }
        due_brokers |= {
            name for name, check_ms in self._next_check_ms.items() if now_ms >= check_ms
        }
        return sorted(due_brokers)

    def is_reported(self, name: str) -> bool:
        """Return True if heartbeats report the broker group as unreachable."""
        return name in self._next_check_ms

    def report(self, name: str, now_ms: int) -> None:
        """Report the broker group as unreachable, and check it again after the patience has
        elapsed.
        """
        self._next_check_ms[name] = now_ms + self._patience_ms

    def stop_reporting(self, name: str, now_ms: int) -> bool:
        """Stop reporting a broker group that is reachable, or that is down for every consumer.
        Return True if it was reported.
        """
        if name in self._failing:
            self._failing[name] = now_ms
        return self._next_check_ms.pop(name, None) is not None


class BrokerReachability:
    """Tracks which brokers the consumer of an exclusive group can reach."""

    def __init__(
        self, membership: Membership, connections: Connections, clock: Clock, *, ttl_ms: int
    ) -> None:
        self._name = membership.member.name
        self._membership = membership
        self._connections = connections
        self._clock = clock
        self._brokers = UnreachedBrokers(patience_for(ttl_ms))
        self._lookup_failures = LogFilter()
        self._check: asyncio.Task[None] | None = None

    @property
    def unreached(self) -> tuple[str, ...]:
        """The broker groups that heartbeats report as unreachable."""
        return self._brokers.reported

    def check(self, clients: Sequence[SessionShell]) -> None:
        """Check the connections of the consumer's partitions; called periodically."""
        failing: dict[str, int] = {}
        reached: set[str] = set()
        for client in clients:
            since_ms = client.calls.failures.no_connection_since_ms
            name = client.calls.broker_group
            if since_ms is not None:
                failing[name] = max(since_ms, failing.get(name, 0))
            elif client.state.tenure.is_acquired:
                reached.add(name)
        for name in self._brokers.update_connections(failing, reached):
            self._log_change(_REACHED, name)
            self._membership.nudge()
        checking = self._check is not None and not self._check.done()
        if not checking and (due_brokers := self._brokers.find_due(self._clock.boot_ms())):
            self._check = start_task(self._check_brokers(due_brokers), name="check brokers")

    def close(self) -> None:
        """Cancel the running check, if there is one."""
        if self._check is not None:
            self._check.cancel()

    async def _check_brokers(self, due_brokers: Sequence[str]) -> None:
        """Look up unreachable brokers at the metaserver, and decide which ones to report."""
        try:
            partitions = await self._membership.partitions_by_broker()
        except KeylaneError as error:
            if failure_text := self._lookup_failures.count_failure(
                error.message, self._clock.boot_ms()
            ):
                log.info(
                    "%s cannot look up brokers that it does not reach: %s", self._name, failure_text
                )
            return
        if failures := self._lookup_failures.end_failures(self._clock.boot_ms()):
            log.info("%s can look up brokers again, after %s", self._name, failures)
        # Concurrently: if the network is cut, each broker costs a timeout.
        await asyncio.gather(
            *(self._check_broker(name, partitions.get(name)) for name in due_brokers)
        )

    async def _check_broker(self, name: str, partition: Partition | None) -> None:
        """Report a broker group, or stop reporting it; `partition` is one of the subject's
        partitions on it.
        """
        is_down = partition is None or partition.address is None
        # Its partitions also retry on their own, but their current backoff may be longer than the
        # broker has been back.
        reached = partition is not None and not is_down and await self._is_reached(partition)
        now_ms = self._clock.boot_ms()
        if name not in self._brokers.find_due(now_ms):
            return  # a partition has reached it in the meantime
        if not is_down and not reached:
            has_changed = not self._brokers.is_reported(name)
            self._brokers.report(name, now_ms)
            text = _UNREACHED
        else:
            has_changed = self._brokers.stop_reporting(name, now_ms)
            text = _DOWN if is_down else _REACHED
        if has_changed:
            self._log_change(text, name)
            self._membership.nudge()

    async def _is_reached(self, partition: Partition) -> bool:
        """
        Return True if the broker answers a request on a data connection.

        An open connection proves nothing. The request has no effect. A refusal counts as an answer:
        this consumer does not own the partition.
        """
        assert partition.address is not None
        group = self._membership.member.group
        lease = (int(partition.partition_id), group, self._membership.session, 0)
        try:
            await self._connections.broker_at(partition.address).call(ListParked(*lease, first=0))
        except NO_CONNECTION:
            return False
        except KeylaneError:
            pass
        return True

    def _log_change(self, text: str, name: str) -> None:
        log.warning(text, self._name, name)
