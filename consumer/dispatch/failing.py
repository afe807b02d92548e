"""Builds what is recorded of a failed attempt. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...protocol.parked import (
    Failure,
    ack_timeout_failure,
    failure_of,
    hanging_failure,
    nack_failure,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecords:
    """
    The failures of one consumer's messages.

    Attributes:
        client: the consumer's display name.
        wall_ms: the wall clock, in milliseconds since 1970.
    """

    client: str
    wall_ms: Callable[[], int]

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
