"""Exponential backoff for retry loops, with jitter that is drawn from the caller's random
generator. Pure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from .settings import check_no_problems, field_values, range_problems

PAUSE_MS_MAX = 86_400_000
FACTOR_MAX = 1_000
_RANGES = {"first_ms": (0, PAUSE_MS_MAX), "max_ms": (1, PAUSE_MS_MAX)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """
    Exponential backoff with jitter: the first pause is about `first_ms` long, and each further
    pause is `factor` times as long as the previous one, up to `max_ms`.

    Raises:
        ConfigError: some values are out of range; the message lists all of them.
    """

    first_ms: int = 50
    max_ms: int = 2_000
    factor: float = 2.0

    def __post_init__(self) -> None:
        problems = range_problems(field_values(self), _RANGES)
        is_number = isinstance(self.factor, int | float) and not isinstance(self.factor, bool)
        if not is_number or not 1 <= self.factor <= FACTOR_MAX:
            problems.append(
                f"factor must be a number from 1 to {FACTOR_MAX}, not {self.factor!r:.40}"
            )
        check_no_problems(problems)

    def pauses(self, rng: random.Random) -> Pauses:
        """Return the pauses of a new retry loop."""
        return Pauses(self, rng)

    def wait_ms(self, attempt: int, rng: random.Random) -> int:
        """
        Return how long to wait after attempt number `attempt`, counted from 1, in milliseconds.

        The result is drawn from [step / 2, step], where step is `first_ms * factor ** (attempt -
        1)`, at most `max_ms`.
        """
        exponent = min(float(self.max_ms), self.first_ms * self.factor ** min(attempt - 1, 32))
        return max(1, int(exponent * (0.5 + rng.random() / 2)))


class Pauses:
    """
    The pauses of one retry loop, which grow with each consecutive failure.

        pauses = backoff.pauses(rng)
        while True:
            try:
                await call()
                pauses.reset()
            except KeylaneError:
                await asyncio.sleep(pauses.next_pause_ms() / 1000)
    """

    __slots__ = ("_backoff", "_rng", "failures")

    def __init__(self, backoff: Backoff, rng: random.Random) -> None:
        self._backoff = backoff
        self._rng = rng
        self.failures = 0
        """The number of failures since the last success."""

    def next_pause_ms(self) -> int:
        """Count a failure, and return the milliseconds to wait before the next attempt."""
        self.failures += 1
        return self._backoff.wait_ms(self.failures, self._rng)

    def skip(self) -> None:
        """Count a failure after which the caller retries without a pause."""
        self.failures += 1

    def reset(self) -> None:
        """Record a success, so that the next pause is the first one again."""
        self.failures = 0
