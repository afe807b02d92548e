"""Rate limits: token buckets that decide how long callers over their quota wait. Pure.

    consume(cost) ─▶ the level falls, even below 0 ─▶ the next call waits until it is 0 again

A bucket holds what its rate allows in one second. A call that finds the bucket empty waits until
the debt of earlier calls is paid. All connections of a principal share its rate, and do not delay
other principals.

Invariants
    Each server applies the quotas to its own calls only. A waiting caller blocks no other caller.
    Calls that renew or release leases (acks, releases, heartbeats) wait only if the debt exceeds
    GRACE_MS, so that no lease is lost because of a quota.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from ...protocol.access.quota import Quota
from ...protocol.errors import ConnectionQuotaError, QuotaExceededError

HOLD_MS = 5_000
"""The maximum time in milliseconds that reading from a connection is paused for one frame; a frame
that would have to wait longer is refused.
"""
GRACE_MS = 5_000
"""The debt in milliseconds up to which calls that renew or release leases do not wait."""
HTTP_HOLD_MS = 2_000
"""The maximum time in milliseconds that a plain HTTP call waits for a quota; a call that would have
to wait longer is refused.
"""
RETRY_CONNECTION_MS = 1_000
KNOWN_MAX = 10_000
"""The maximum number of principals, and of subjects, whose buckets are remembered."""


class TokenBucket:
    """Limits a rate: it fills by `rate` units per second, up to one second's worth."""

    __slots__ = ("_filled_at_ms", "_level", "rate")

    def __init__(self, rate: int, now_ms: float) -> None:
        self.rate = rate
        self._level = float(rate)
        self._filled_at_ms = now_ms

    def debt_ms(self, now_ms: float) -> float:
        """Return the time in milliseconds until the debt is paid, or 0 if there is none."""
        self._fill(now_ms)
        return max(0.0, -self._level * 1000 / self.rate)

    def consume(self, cost: int, now_ms: float) -> None:
        """Consume `cost` units; the level may fall below 0."""
        self._fill(now_ms)
        self._level -= cost

    def _fill(self, now_ms: float) -> None:
        elapsed_ms = max(0.0, now_ms - self._filled_at_ms)
        self._level = min(float(self.rate), self._level + elapsed_ms * self.rate / 1000)
        self._filled_at_ms = now_ms


class Delay(NamedTuple):
    """How long a caller must wait, in milliseconds, and which limit requires it."""

    ms: float
    limit: str


NO_DELAY = Delay(0.0, "")
PAUSE_MS = 5_000
"""Calls that wait for a limit again after a shorter time have waited for it all the time."""


class Limited(NamedTuple):
    """The limit for which calls about a subject wait; "" if they do not."""

    limit: str
    left_ms: int
    """How long they wait for it yet, in milliseconds."""
    for_ms: int
    """The time since calls began to wait for it, in milliseconds."""


NOT_LIMITED = Limited("", 0, 0)


class _PrincipalBuckets:
    """The token buckets of one principal; None where there is no limit."""

    def __init__(self, quota: Quota, now_ms: float) -> None:
        self.quota = quota
        self.bytes = TokenBucket(quota.bytes_per_s, now_ms) if quota.bytes_per_s else None
        self.requests = TokenBucket(quota.requests_per_s, now_ms) if quota.requests_per_s else None


class Pacing:
    """Applies quotas at one server; `now_ms` may come from any monotonic clock in milliseconds."""

    def __init__(self) -> None:
        self._principals: OrderedDict[str, _PrincipalBuckets] = OrderedDict()
        self._subjects: OrderedDict[str, TokenBucket] = OrderedDict()
        self.connections: Counter[str] = Counter()
        """The number of open data-plane connections by principal."""
        self.waited_ms: Counter[str] = Counter()
        """The total waiting time of calls in milliseconds, by principal."""
        self._limited: OrderedDict[str, tuple[str, float, float]] = OrderedDict()
        """By subject, the limit for which a call about it waited last, until when, and since when
        calls have waited for it.
        """

    def delay(
        self,
        principal: str,
        quota: Quota,
        now_ms: float,
        *,
        subject: str = "",
        subject_rate: int = 0,
    ) -> Delay:
        """Return how long a call by the principal would have to wait now, without counting the
        call.
        """
        buckets = self._buckets_of(principal, quota, now_ms)
        delays = [
            Delay(bucket.debt_ms(now_ms), f"{unit} of principal {principal!r}")
            for unit, bucket in (("bytes", buckets.bytes), ("requests", buckets.requests))
            if bucket is not None
        ]
        if subject_rate:
            delays.append(self.subject_delay(subject, subject_rate, now_ms))
        return max(delays, default=NO_DELAY)

    def subject_delay(self, subject: str, rate: int, now_ms: float) -> Delay:
        """Return how long a call that sends messages to the subject would have to wait for the
        subject's limit, without counting the call.
        """
        debt_ms = self._subject_bucket(subject, rate, now_ms).debt_ms(now_ms)
        return Delay(debt_ms, f"bytes of subject {subject!r}")

    def consume_subject(self, subject: str, rate: int, size: int, now_ms: float) -> None:
        """Count bytes that are sent to the subject."""
        self._subject_bucket(subject, rate, now_ms).consume(size, now_ms)

    def consume(
        self,
        principal: str,
        quota: Quota,
        now_ms: float,
        *,
        size: int = 0,
        requests: int = 1,
        subject: str = "",
        subject_rate: int = 0,
    ) -> None:
        """Count the bytes and requests of a call against the quotas."""
        buckets = self._buckets_of(principal, quota, now_ms)
        if buckets.bytes is not None and size:
            buckets.bytes.consume(size, now_ms)
        if buckets.requests is not None and requests:
            buckets.requests.consume(requests, now_ms)
        if subject_rate and size:
            self.consume_subject(subject, subject_rate, size, now_ms)

    def record_wait(self, principal: str, delay: Delay) -> None:
        """Count a wait in the metrics."""
        self.waited_ms[principal] += round(delay.ms)
        if len(self.waited_ms) > 2 * KNOWN_MAX:
            self.waited_ms = Counter(dict(self.waited_ms.most_common(KNOWN_MAX)))

    def note_limited(self, subject: str, delay: Delay, now_ms: float) -> None:
        """Note that a call about a subject has to wait."""
        limit, until_ms, since_ms = self._limited.get(subject, ("", 0.0, 0.0))
        if limit != delay.limit or now_ms - until_ms > PAUSE_MS:
            since_ms = now_ms
        self._limited[subject] = delay.limit, now_ms + delay.ms, since_ms
        self._limited.move_to_end(subject)
        if len(self._limited) > KNOWN_MAX:
            self._limited.popitem(last=False)

    def limited(self, subject: str, now_ms: float) -> Limited:
        """Return for which limit calls about a subject have to wait now."""
        limit, until_ms, since_ms = self._limited.get(subject, ("", 0.0, 0.0))
        if until_ms <= now_ms:
            return NOT_LIMITED
        return Limited(limit, round(until_ms - now_ms), round(now_ms - since_ms))

    def add_connection(self, principal: str, quota: Quota) -> None:
        """Count a new connection. Raises ConnectionQuotaError."""
        if quota.connections and self.connections[principal] >= quota.connections:
            raise ConnectionQuotaError(
                f"{principal!r} has {quota.connections} connections here, and may have no more",
                principal=principal,
                limit=quota.connections,
                retry_after_ms=RETRY_CONNECTION_MS,
            )
        self.connections[principal] += 1

    def remove_connection(self, principal: str) -> None:
        """Count a connection as closed."""
        self.connections[principal] -= 1
        if self.connections[principal] <= 0:
            del self.connections[principal]

    def _buckets_of(self, principal: str, quota: Quota, now_ms: float) -> _PrincipalBuckets:
        buckets = self._principals.get(principal)
        if buckets is None or buckets.quota != quota:
            buckets = self._principals[principal] = _PrincipalBuckets(quota, now_ms)
            if len(self._principals) > KNOWN_MAX:
                self._principals.popitem(last=False)
        self._principals.move_to_end(principal)
        return buckets

    def _subject_bucket(self, subject: str, rate: int, now_ms: float) -> TokenBucket:
        bucket = self._subjects.get(subject)
        if bucket is None or bucket.rate != rate:
            bucket = self._subjects[subject] = TokenBucket(rate, now_ms)
            if len(self._subjects) > KNOWN_MAX:
                self._subjects.popitem(last=False)
        return bucket


def quota_exceeded(principal: str, delay: Delay) -> QuotaExceededError:
    """Return the error for a call that would have to wait too long."""
    return QuotaExceededError(
        f"the limit of {delay.limit} is used up for {delay.ms / 1000:.1f} s",
        principal=principal,
        retry_after_ms=round(delay.ms),
    )
