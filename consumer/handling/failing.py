"""Decides when a failing message is not tried again, and which part of its error is kept. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ...protocol.backoff import Backoff
from ...protocol.message import Message
from ...protocol.parked import Failure, failure_of, nack_of, passed_over_of, running_of
from ..settings import ConsumerSettings, FailurePolicy
from .not_acked import Retry, asked_wait_ms, only_retry


def _no_time() -> int:
    return 0


@dataclass(slots=True, kw_only=True)
class Failing:
    """
    The policy of a consumer, which may change while handlers run.

    Attributes:
        tries_max: the try after which `policy` applies; under RETRY that is the first one, and
            `retry_tries_max` the last.
        retry_backoff: the pauses under RETRY.
        in_place: whether a message under RETRY stays in place between its tries, as in a shared
            group, where none waits for it.
        client: the name of the consumer, for people.
        wall_ms: the calendar, in milliseconds since 1970.
    """

    policy: FailurePolicy = FailurePolicy.BLOCK
    tries_max: int = 10
    retry_tries_max: int = 32
    retry_backoff: Backoff = field(default_factory=Backoff)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    in_place: bool = False
    client: str = ""
    wall_ms: Callable[[], int] = _no_time

    def adopt(self, settings: ConsumerSettings) -> None:
        """Follow these settings from now on, including for messages that wait for their next
        try.
        """
        self.policy = settings.failure_policy
        self.tries_max = settings.tries_max
        self.retry_tries_max = settings.retry_tries_max
        self.retry_backoff = settings.retry_backoff

    def is_last(self, message: Message, error: BaseException) -> bool:
        """Return True if `message`, which just failed with `error`, is set aside; a handler that
        asks for another try always gets it.
        """
        if self.policy is FailurePolicy.RETRY:
            return self.is_last_try(message)
        return self.is_last_try(message) and not isinstance(only_retry(error) or error, Retry)

    def is_last_try(self, message: Message) -> bool:
        """Return True if `message` is set aside if its present try fails."""
        if self.policy is FailurePolicy.RETRY:
            return not self.in_place or message.attempt >= self.retry_tries_max
        return self.policy is not FailurePolicy.BLOCK and message.attempt >= self.tries_max

    def pause_ms(self, message: Message, asked_ms: int | None) -> int | None:
        """
        Return the milliseconds until a message that is set aside is tried again automatically; None
        if it is not.

        Args:
            asked_ms: the pause that the handler, or the program, asked for; the result is at least
                as long.
        """
        if self.policy is not FailurePolicy.RETRY or message.attempt >= self.retry_tries_max:
            return None
        return max(asked_ms or 0, self.retry_backoff.wait_ms(message.attempt, self.rng))

    def asked_ms(self, asked_ms: int, attempt: int) -> int:
        """Return the milliseconds until the next try in place, if try number `attempt` asked for a
        pause of `asked_ms`.
        """
        wait_ms = asked_wait_ms(asked_ms, attempt)
        if self.policy is FailurePolicy.RETRY and self.in_place:
            return max(wait_ms, self.retry_backoff.wait_ms(attempt, self.rng))
        return wait_ms

    def parks(self, message: Message) -> bool:
        """Return True if later messages of its key are set aside with a message of an exclusive
        group; False if it is set aside alone.
        """
        return (
            self.policy is FailurePolicy.PARK
            and bool(message.key)
            and not message.delivery.is_loose  # type: ignore[union-attr]
        )

    def failure(self, error: BaseException, attempts: int) -> Failure:
        """Return the record of the error that is kept."""
        return failure_of(error, client=self.client, at_ms=self.wall_ms(), attempts=attempts)

    def given_back(self, attempts: int, error: BaseException | None = None) -> Failure:
        """Return the record of a message that the program gave back, or whose loop body ended with
        `error`.
        """
        if error is not None:
            return self.failure(error, attempts)
        return nack_of(client=self.client, at_ms=self.wall_ms(), attempts=attempts)

    def passed_over(self, attempts: int) -> Failure:
        """Return the record of a message of a shared group that the program neither acked nor gave
        back in time.
        """
        return passed_over_of(client=self.client, at_ms=self.wall_ms(), attempts=attempts)

    def hanging(self, what: str, attempt: int) -> Failure:
        """Return the record of a message whose try number `attempt` does not end."""
        return running_of(what, client=self.client, at_ms=self.wall_ms(), attempts=attempt - 1)
