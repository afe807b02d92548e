"""Pauses between tries, with jitter from a random generator that the caller passes.  Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential waits with jitter: attempt 1 waits about `first_ms`, later ones up to `max_ms`."""

    first_ms: int = 50
    max_ms: int = 2_000
    factor: float = 2.0

    def wait_ms(self, attempt: int, rng: random.Random) -> int:
        """
        Milliseconds to wait after `attempt`, which counts from 1.

        The result is drawn from [step / 2, step], where step is `first_ms * factor ** (attempt - 1)`, at most `max_ms`.
        """
        step = min(float(self.max_ms), self.first_ms * self.factor ** min(attempt - 1, 32))
        return max(1, int(step * (0.5 + rng.random() / 2)))
