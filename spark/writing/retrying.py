"""Retries the calls of a write for a limited time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ...protocol.backoff import Backoff
from ...protocol.clock import Clock
from ...protocol.errors import KeylaneError, RetryRule

T = TypeVar("T")
_BACKOFF = Backoff()


async def retry_call(
    call: Callable[[], Awaitable[T]], *, timeout_ms: int, clock: Clock, rng: random.Random
) -> T:
    """Repeat `call()` until it succeeds. Raises a permanent error immediately, and any error after
    `timeout_ms`.
    """
    deadline_ms = clock.boot_ms() + timeout_ms
    pauses = _BACKOFF.pauses(rng)
    while True:
        try:
            return await call()
        except KeylaneError as error:
            if error.retry is RetryRule.NEVER or clock.boot_ms() >= deadline_ms:
                raise
        await asyncio.sleep(pauses.next_pause_ms() / 1000)
