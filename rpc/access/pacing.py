"""Decides how long callers over their quota wait: token buckets of principals and subjects. Pure.

    take(cost) ─▶ the level falls, even below 0 ─▶ the next call waits until it is 0 again

A bucket holds one second of its rate. A call that finds it empty waits for the debt of earlier
calls. The connections of one principal share its rate; callers of other principals do not wait for
it.

Invariants
    Quotas hold for one server; while a caller waits, no lock and no memory is held for others.
    Calls that keep leases (acks, releases, heartbeats) wait only for a debt above GRACE_MS, so that
    a quota costs no lease.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from ...protocol.access.quota import Quota
from ...protocol.errors import ConnectionQuotaError, QuotaExceededError

HOLD_MS = 5_000
"""Most milliseconds for which a connection is not read because of one frame; a frame with a longer
debt is refused.
"""
GRACE_MS = 5_000
HTTP_HOLD_MS = 2_000
RETRY_CONNECTION_MS = 1_000
KNOWN_MAX = 10_000


class TokenBucket:
    """A rate, averaged over seconds."""

    __slots__ = ("_at_ms", "_level", "rate")

    def __init__(self, rate: int, now_ms: float) -> None:
        self.rate = rate
        self._level = float(rate)
        self._at_ms = now_ms

    def debt_ms(self, now_ms: float) -> float:
        """Return the milliseconds after which nothing is owed."""
        self._fill(now_ms)
        return max(0.0, -self._level * 1000 / self.rate)

    def take(self, cost: int, now_ms: float) -> None:
        """Use up `cost` units."""
        self._fill(now_ms)
        self._level -= cost

    def _fill(self, now_ms: float) -> None:
        passed = max(0.0, now_ms - self._at_ms)
        self._level = min(float(self.rate), self._level + passed * self.rate / 1000)
        self._at_ms = now_ms


class Delay(NamedTuple):
    """The milliseconds that a caller waits, and the limit that is the reason."""

    ms: float
    limit: str


NO_DELAY = Delay(0.0, "")


class _Pace:
    """The buckets of one principal."""

    def __init__(self, quota: Quota, now_ms: float) -> None:
        self.quota = quota
        self.bytes = TokenBucket(quota.bytes_per_s, now_ms) if quota.bytes_per_s else None
        self.requests = TokenBucket(quota.requests_per_s, now_ms) if quota.requests_per_s else None


class Pacing:
    """The quotas of one server; clocks are passed in, in milliseconds."""

    def __init__(self) -> None:
        self._paces: OrderedDict[str, _Pace] = OrderedDict()
        self._subjects: OrderedDict[str, TokenBucket] = OrderedDict()
        self.connections: Counter[str] = Counter()
        """Number of open connections of the data plane, by principal."""
        self.waited_ms: Counter[str] = Counter()
        """Milliseconds that calls have waited, by principal."""

    def delay(
        self,
        principal: str,
        quota: Quota,
        now_ms: float,
        *,
        subject: str = "",
        subject_rate: int = 0,
    ) -> Delay:
        """Return how long a call of the principal would wait now, without counting it."""
        pace = self._pace(principal, quota, now_ms)
        waits = [
            Delay(bucket.debt_ms(now_ms), f"{what} of principal {principal!r}")
            for what, bucket in (("bytes", pace.bytes), ("requests", pace.requests))
            if bucket is not None
        ]
        if subject_rate:
            waits.append(self.subject_delay(subject, subject_rate, now_ms))
        return max(waits, default=NO_DELAY)

    def subject_delay(self, subject: str, rate: int, now_ms: float) -> Delay:
        """Return how long a call that stores messages in the subject waits for its limit alone,
        without counting it.
        """
        debt_ms = self._bucket(subject, rate, now_ms).debt_ms(now_ms)
        return Delay(debt_ms, f"bytes of subject {subject!r}")

    def take_subject(self, subject: str, rate: int, size: int, now_ms: float) -> None:
        """Count bytes that are stored in the subject."""
        self._bucket(subject, rate, now_ms).take(size, now_ms)

    def take(
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
        """Count a call."""
        pace = self._pace(principal, quota, now_ms)
        if pace.bytes is not None and size:
            pace.bytes.take(size, now_ms)
        if pace.requests is not None and requests:
            pace.requests.take(requests, now_ms)
        if subject_rate and size:
            self.take_subject(subject, subject_rate, size, now_ms)

    def note_wait(self, principal: str, delay: Delay) -> None:
        """Count a wait, for the metrics."""
        self.waited_ms[principal] += round(delay.ms)
        if len(self.waited_ms) > 2 * KNOWN_MAX:
            self.waited_ms = Counter(dict(self.waited_ms.most_common(KNOWN_MAX)))

    def enter(self, principal: str, quota: Quota) -> None:
        """Count a new connection. Raises ConnectionQuotaError."""
        if quota.connections and self.connections[principal] >= quota.connections:
            raise ConnectionQuotaError(
                f"{principal!r} has {quota.connections} connections here, and may have no more",
                principal=principal,
                limit=quota.connections,
                retry_after_ms=RETRY_CONNECTION_MS,
            )
        self.connections[principal] += 1

    def leave(self, principal: str) -> None:
        """Count the end of a connection."""
        self.connections[principal] -= 1
        if self.connections[principal] <= 0:
            del self.connections[principal]

    def known(self) -> Iterable[str]:
        """Return the principals whose pace is known."""
        return self._paces

    def _pace(self, principal: str, quota: Quota, now_ms: float) -> _Pace:
        pace = self._paces.get(principal)
        if pace is None or pace.quota != quota:
            pace = self._paces[principal] = _Pace(quota, now_ms)
            if len(self._paces) > KNOWN_MAX:
                self._paces.popitem(last=False)
        self._paces.move_to_end(principal)
        return pace

    def _bucket(self, subject: str, rate: int, now_ms: float) -> TokenBucket:
        bucket = self._subjects.get(subject)
        if bucket is None or bucket.rate != rate:
            bucket = self._subjects[subject] = TokenBucket(rate, now_ms)
            if len(self._subjects) > KNOWN_MAX:
                self._subjects.popitem(last=False)
        return bucket


def exceeded(principal: str, delay: Delay) -> QuotaExceededError:
    """Return the refusal of a call that would wait too long."""
    return QuotaExceededError(
        f"the limit of {delay.limit} is used up for {delay.ms / 1000:.1f} s",
        principal=principal,
        retry_after_ms=round(delay.ms),
    )
