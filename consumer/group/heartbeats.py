"""Decides how long a heartbeat waits for its reply, so that every metaserver can be tried before
the lease ends. Pure.

    lease ├──────────────────────────── ttl - margin ────────────────────────────┤
          ├─ long poll ─┼─ long poll, no reply ──┼─ share ─┼─ share ─┼─ share ─┤
          sent          reply, sent again         next address …

A metaserver replies to a long poll after `wait_ms` at the latest. The rest of the lease is then
divided equally among the addresses that have not failed since the last reply. An urgent heartbeat
is not a long poll, and gets its reply at once.

Invariants
    All but one of `addresses` metaservers may hang at once, and the last one is still tried before
    the lease ends. The lease is kept if a metaserver that does not hang replies within `(ttl -
    margin - 2 * wait_ms) / (addresses + 1)`, and within `GRACE_MS_MAX`. For a ttl up to 40 s the
    former is 0.4 ttl / (addresses + 1): 200 ms for three addresses and a ttl of 2 s. Interrupting a
    heartbeat does not give a hanging metaserver more time, because the timeouts depend on the end
    of the lease.
"""

from __future__ import annotations

TRIES_MIN = 2
"""The minimum number of attempts before the lease ends, even with one metaserver, because a reply
may get lost.
"""
WAITS_PER_TTL = 4
"""A long poll takes at most 1/WAITS_PER_TTL of the ttl, so that after two of them there is time to
find another metaserver.
"""
TIMEOUT_MS_MIN = 50
GRACE_MS_MAX = 1_000
"""How late the reply to a long poll may be, in milliseconds; half of the long poll if that is
more.
"""


class HeartbeatTimeouts:
    """Computes the timeouts of one session's heartbeats."""

    def __init__(self, *, addresses: int, ttl_ms: int, margin_ms: int, timeout_max_ms: int) -> None:
        self._addresses = addresses
        self._tries = max(TRIES_MIN, addresses)
        self._ttl_ms = ttl_ms
        self._lease_ms = ttl_ms - margin_ms
        self._timeout_max_ms = timeout_max_ms
        self._failures = 0
        """The number of failed attempts since the last reply."""
        self.requested_ms = 0
        """
        The boot time of the first request for the session.

        The lease counts from that time, because the metaserver may already have started the
        session, and a repeated join does not renew it.
        """
        self._lease_end_ms = 0
        """The end of the lease, on the boot clock."""
        self.wait_ms = ttl_ms // WAITS_PER_TTL
        """How long the metaserver may wait for a change before it replies, in milliseconds."""

    def start_session(self, heartbeat_ms: int) -> None:
        """Start the requested session, with a heartbeat every `heartbeat_ms`."""
        self.wait_ms = min(heartbeat_ms, self._ttl_ms // WAITS_PER_TTL)
        self.record_grant(self.requested_ms + self._lease_ms)

    def record_grant(self, lease_end_ms: int) -> None:
        """Record a reply: the lease now ends at `lease_end_ms`."""
        self._failures = 0
        self._lease_end_ms = lease_end_ms

    def allows_long_poll(self, now_ms: int) -> bool:
        """Return True if the next heartbeat may be a long poll: as much of the lease remains as
        after a long poll.
        """
        return self._lease_end_ms - now_ms >= self._lease_ms - self.wait_ms

    def record_failure(self) -> bool:
        """Record a failed attempt. Return True if every address has failed since the last reply."""
        self._failures += 1
        return self._failures >= self._addresses

    def timeout_ms(self, now_ms: int, *, wait_ms: int) -> int:
        """Return the total timeout of the next heartbeat, in milliseconds, including the `wait_ms`
        that the metaserver may wait for a change.
        """
        remaining_ms = self._lease_end_ms - now_ms
        if remaining_ms <= 0:
            remaining_ms = self._lease_ms  # the lease has ended, so the next attempt is not urgent
        share_ms = (remaining_ms - wait_ms) // (self._tries - self._failures % self._tries)
        limit_ms = max(GRACE_MS_MAX, wait_ms // 2) if wait_ms else self._timeout_max_ms
        limit_ms = min(limit_ms, self._timeout_max_ms)
        return wait_ms + min(max(share_ms, TIMEOUT_MS_MIN), limit_ms)
