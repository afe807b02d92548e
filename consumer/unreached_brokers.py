"""Tracks brokers that a consumer cannot connect to although the metaserver hears from them, so that
the consumer's heartbeats can report them. Pure.

    the calls of a partition fail for `patience_ms` ─▶ does the metaserver hear from its broker?
        no  ─▶ wait again
        yes ─▶ report it in each heartbeat, so that other members get its partitions ─▶ check again
                  ─▶ reached, or no longer a broker of the subject: no longer reported

A broker that is down is unreachable for every consumer. It is not reported, so that partitions do
not move back and forth while it restarts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..protocol.errors import ConnectionQuotaError, UnreachableError
from ..protocol.limits import UNREACHED_MAX

NO_CONNECTION = (UnreachableError, ConnectionQuotaError)
"""The errors that mean there is no connection. With ConnectionQuotaError, the broker closed this
connection in favour of another principal's, until a connection slot is free.
"""
PATIENCE_MS_MIN = 15_000
"""The minimum patience, in milliseconds, which is longer than the metaserver needs to notice that a
broker is silent (`broker_ttl_ms`).
"""


def patience_for(ttl_ms: int) -> int:
    """Return how many milliseconds a consumer keeps its grants on a broker that it cannot connect
    to.
    """
    return max(ttl_ms, PATIENCE_MS_MIN)


class UnreachedBrokers:
    """Tracks the broker groups without a connection. All times are in milliseconds on the boot
    clock.
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
