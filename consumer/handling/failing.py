"""When a failing message is not tried again, and what is kept of its error.  Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...protocol.message import Message
from ...protocol.parked import Failure, failure_of, nack_of
from ..settings import ConsumerSettings, FailurePolicy
from .not_acked import Retry, only_retry


def _no_time() -> int:
    return 0


@dataclass(slots=True, kw_only=True)
class Failing:
    """
    The policy of a consumer, which may change while handlers run.

    Attributes:
        tries_max: the try after which `policy` applies.
        client: the name of the consumer, for people.
        wall_ms: the calendar, in milliseconds since 1970.
    """

    policy: FailurePolicy = FailurePolicy.BLOCK
    tries_max: int = 10
    client: str = ""
    wall_ms: Callable[[], int] = _no_time

    def adopt(self, settings: ConsumerSettings) -> None:
        """Follow these settings from now on, also for messages that wait for their next try."""
        self.policy, self.tries_max = settings.on_failure, settings.tries_max

    def is_last(self, message: Message, error: BaseException) -> bool:
        """True if `message`, which just failed with `error`, is set aside; a handler that asks for another try gets it."""
        return self.is_last_try(message) and not isinstance(only_retry(error) or error, Retry)

    def is_last_try(self, message: Message) -> bool:
        """True if `message` is set aside if its present try fails."""
        return self.policy is not FailurePolicy.BLOCK and message.attempt >= self.tries_max

    def parks(self, message: Message) -> bool:
        """True if later messages of its key are set aside with a message of an exclusive group; False: it is alone."""
        return (
            self.policy is FailurePolicy.PARK
            and bool(message.key)
            and not message.delivery.is_loose  # type: ignore[union-attr]
        )

    def failure(self, error: BaseException, attempts: int) -> Failure:
        """What is kept of the error."""
        return failure_of(error, client=self.client, at_ms=self.wall_ms(), attempts=attempts)

    def given_back(self, attempts: int) -> Failure:
        """What is kept of a message that the program gave back too often."""
        return nack_of(client=self.client, at_ms=self.wall_ms(), attempts=attempts)
