"""Decides how long a heartbeat waits for its answer, so that every metaserver can be asked before
the lease ends. Pure.

    lease ├──────────────────────────── ttl - margin ────────────────────────────┤
          ├─ long poll ─┼─ long poll, no answer ─┼─ share ─┼─ share ─┼─ share ─┤
          sent          answered, sent                     left       left

A long poll is answered after `wait_ms` at the latest. The rest of the lease is then divided
equally among the addresses that have not failed since the last answer; a heartbeat in a hurry is
answered at once.

Invariants
    All but one of `addresses` metaservers may hang at once, and the last one is asked while the
    lease holds. The lease is kept if a metaserver that does not hang answers within `(ttl - margin
    - 2 * wait_ms) / (addresses + 1)`. For a ttl up to 40 s that is 0.4 ttl / (addresses + 1), so
    200 ms for three addresses and a ttl of 2 s; `GRACE_MS_MAX` if less. Breaking a heartbeat off
    gives a hanging metaserver no more time: the end of the lease is what counts.
"""

from __future__ import annotations

TRIES_MIN = 2
"""The least number of tries before the lease ends, even with one metaserver, because an answer may
get lost.
"""
WAITS_PER_TTL = 4
"""The divisor of the ttl for the longest long poll: after two of them there is time left to find
another metaserver.
"""
TIMEOUT_MS_MIN = 50
GRACE_MS_MAX = 1_000
"""The milliseconds by which an answer to a long poll may be late; half of the long poll if that is
more.
"""


class HeartbeatTimeouts:
    """The time-outs of one session's heartbeats."""

    def __init__(self, *, addresses: int, ttl_ms: int, margin_ms: int, timeout_max_ms: int) -> None:
        self._addresses = addresses
        self._tries = max(TRIES_MIN, addresses)
        self._ttl_ms = ttl_ms
        self._lease_ms = ttl_ms - margin_ms
        self._timeout_max_ms = timeout_max_ms
        self._failed = 0
        """The number of tries without an answer since the last answer."""
        self._until_ms = 0
        """The end of the lease, on the boot clock."""
        self.wait_ms = ttl_ms // WAITS_PER_TTL
        """The milliseconds for which the metaserver may wait for a change before it answers."""

    def begin(self, sent_at_ms: int, heartbeat_ms: int) -> None:
        """Note that a join sent at `sent_at_ms` began a session, with a heartbeat every
        `heartbeat_ms`.
        """
        self.wait_ms = min(heartbeat_ms, self._ttl_ms // WAITS_PER_TTL)
        self.granted(sent_at_ms + self._lease_ms)

    def granted(self, until_ms: int) -> None:
        """Note that a metaserver answered, and that the lease now ends at `until_ms`."""
        self._failed = 0
        self._until_ms = until_ms

    def allows_long_poll(self, now_ms: int) -> bool:
        """Return whether the next heartbeat may wait for a change, because as much of the lease is
        left as after a long poll.
        """
        return self._until_ms - now_ms >= self._lease_ms - self.wait_ms

    def failed(self) -> bool:
        """Note that a try failed, and return True if every address was tried since the last
        answer.
        """
        self._failed += 1
        return self._failed >= self._addresses

    def timeout_ms(self, now_ms: int, *, wait_ms: int) -> int:
        """Return the whole time-out of the next heartbeat, in milliseconds; the metaserver may wait
        `wait_ms` of it for a change.
        """
        left_ms = self._until_ms - now_ms
        if left_ms <= 0:
            left_ms = self._lease_ms  # the lease has ended: no try is urgent
        share_ms = (left_ms - wait_ms) // (self._tries - self._failed % self._tries)
        most_ms = max(GRACE_MS_MAX, wait_ms // 2) if wait_ms else self._timeout_max_ms
        most_ms = min(most_ms, self._timeout_max_ms)
        return wait_ms + min(max(share_ms, TIMEOUT_MS_MIN), most_ms)
