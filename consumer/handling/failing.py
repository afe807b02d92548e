"""Decides when a failing message is no longer retried in place, and what is recorded about its
error. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ...protocol.backoff import Backoff
from ...protocol.message import Message
from ...protocol.parked import (
    Failure,
    ack_timeout_failure,
    failure_of,
    hanging_failure,
    nack_failure,
)
from ..settings import ConsumerSettings, FailurePolicy
from .not_acked import Retry, limited_wait_ms, only_retry


def _zero_ms() -> int:
    return 0


@dataclass(slots=True, kw_only=True)
class FailureRules:
    """
    The failure policy of a consumer, which may change while handlers run.

    Attributes:
        tries_max: the number of attempts after which `policy` applies. Under RETRY the policy
            applies after the first attempt, and `retry_tries_max` limits the attempts.
        retry_backoff: the pauses under RETRY.
        in_place: True if messages under RETRY stay in memory between attempts, as in a shared
            group, where no message waits for another.
        client: the consumer's display name.
        wall_ms: the wall clock, in milliseconds since 1970.
    """

    policy: FailurePolicy = FailurePolicy.BLOCK
    tries_max: int = 10
    retry_tries_max: int = 32
    retry_backoff: Backoff = field(default_factory=Backoff)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    in_place: bool = False
    client: str = ""
    wall_ms: Callable[[], int] = _zero_ms

    def apply_settings(self, settings: ConsumerSettings) -> None:
        """Apply new settings, also to messages that already wait for their next attempt."""
        self.policy = settings.failure_policy
        self.tries_max = settings.tries_max
        self.retry_tries_max = settings.retry_tries_max
        self.retry_backoff = settings.retry_backoff

    def is_last(self, message: Message, error: BaseException) -> bool:
        """Return True if `message`, which just failed with `error`, must be set aside. A retry that
        the handler requested is granted, except under RETRY.
        """
        if self.policy is FailurePolicy.RETRY:
            return self.is_last_try(message)
        return self.is_last_try(message) and not isinstance(only_retry(error) or error, Retry)

    def is_last_try(self, message: Message) -> bool:
        """Return True if `message` must be set aside when its current attempt fails."""
        if self.policy is FailurePolicy.RETRY:
            return not self.in_place or message.attempt >= self.retry_tries_max
        return self.policy is not FailurePolicy.BLOCK and message.attempt >= self.tries_max

    def pause_ms(self, message: Message, requested_ms: int | None) -> int | None:
        """
        Return how long a message that is set aside waits for its automatic retry, in milliseconds,
        or None if it is not retried.

        Args:
            requested_ms: the pause that the handler or the program requested, a lower bound of the
                result.
        """
        if self.policy is not FailurePolicy.RETRY or message.attempt >= self.retry_tries_max:
            return None
        return max(requested_ms or 0, self.retry_backoff.wait_ms(message.attempt, self.rng))

    def retry_wait_ms(self, requested_ms: int, attempt: int) -> int:
        """Return the time until the next attempt in place, in milliseconds, if attempt number
        `attempt` requested `requested_ms`.
        """
        wait_ms = limited_wait_ms(requested_ms, attempt)
        if self.policy is FailurePolicy.RETRY and self.in_place:
            return max(wait_ms, self.retry_backoff.wait_ms(attempt, self.rng))
        return wait_ms

    def parks(self, message: Message) -> bool:
        """Return True if later messages of the key are parked with the message, or False if only
        the message itself is set aside.
        """
        return (
            self.policy is FailurePolicy.PARK
            and bool(message.key)
            and not message.delivery.is_loose  # type: ignore[union-attr]
        )

    def build_failure(self, error: BaseException, attempts: int) -> Failure:
        """Return the failure to record for an error."""
        return failure_of(error, client=self.client, at_ms=self.wall_ms(), attempts=attempts)

    def build_nack_failure(self, attempts: int, error: BaseException | None = None) -> Failure:
        """Return the failure to record for a message that the program nacked, or whose loop body
        raised `error`.
        """
        if error is not None:
            return self.build_failure(error, attempts)
        return nack_failure(client=self.client, at_ms=self.wall_ms(), attempts=attempts)

    def build_unacked_failure(self, attempts: int) -> Failure:
        """Return the failure to record for a shared group's message that the program neither acked
        nor nacked in time.
        """
        return ack_timeout_failure(client=self.client, at_ms=self.wall_ms(), attempts=attempts)

    def build_hang_failure(self, what: str, attempt: int) -> Failure:
        """Return the failure to record for a message whose attempt number `attempt` is hanging."""
        return hanging_failure(what, client=self.client, at_ms=self.wall_ms(), attempts=attempt - 1)
