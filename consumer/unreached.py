"""Tracks brokers to which a consumer gets no connection although they report to the cluster, for
its reports to the metaserver. Pure.

    a pull client fails ─▶ for the patience ─▶ does its broker report to the cluster?
        no  ─▶ waits again
        yes ─▶ reported in each heartbeat, others get the partitions ─▶ checked again
                  ─▶ reached, or no broker of the subject: no longer reported

A broker that is down is away for every consumer: it is not reported, so partitions do not move back
and forth while it restarts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..protocol.errors import ConnectionQuotaError, UnreachableError
from ..protocol.limits import UNREACHED_MAX

NO_CONNECTION = (UnreachableError, ConnectionQuotaError)
"""The errors for a missing connection; by the second, a broker has ended the connection for another
principal, until a place is free.
"""
PATIENCE_MS_MIN = 15_000
"""The least patience, in milliseconds: above the time within which the cluster notes that a broker
is silent (`broker_ttl_ms`).
"""


def patience_for(ttl_ms: int) -> int:
    """Return the milliseconds for which a consumer without a connection keeps its grants at a
    broker.
    """
    return max(ttl_ms, PATIENCE_MS_MIN)


class UnreachedBrokers:
    """The broker groups without a connection, and since when; every time is of the boot clock, in
    milliseconds.
    """

    def __init__(self, patience_ms: int) -> None:
        self._patience_ms = patience_ms
        self._failing: dict[str, int] = {}
        """The time from which its patience counts, by broker group with partitions of the
        consumer.
        """
        self._looks: dict[str, int] = {}
        """The time of the next check, by broker group that was reported."""

    @property
    def told(self) -> tuple[str, ...]:
        """Return the broker groups that heartbeats report."""
        return tuple(sorted(self._looks))[:UNREACHED_MAX]

    def note(self, failing: Mapping[str, int], reached: Collection[str]) -> list[str]:
        """
        Note the connections of the consumer's partitions.

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
        back = sorted(self._looks.keys() & set(reached))
        for name in back:
            del self._looks[name]
        return back

    def due(self, now_ms: int) -> list[str]:
        """Return those about which the cluster is to be asked now."""
        over = {
            name
            for name, since_ms in self._failing.items()
            if name not in self._looks and now_ms - since_ms >= self._patience_ms
        }
        over |= {name for name, look_ms in self._looks.items() if now_ms >= look_ms}
        return sorted(over)

    def is_told(self, name: str) -> bool:
        """Return whether heartbeats say that a broker group is not reached."""
        return name in self._looks

    def stay(self, name: str, now_ms: int) -> None:
        """Report, from now on or still, that a broker group is not reached; it is checked again
        after the patience.
        """
        self._looks[name] = now_ms + self._patience_ms

    def forget(self, name: str, now_ms: int) -> bool:
        """Stop reporting a broker group: it is reached, or away for every consumer. Return whether
        it was reported.
        """
        if name in self._failing:
            self._failing[name] = now_ms
        return self._looks.pop(name, None) is not None
