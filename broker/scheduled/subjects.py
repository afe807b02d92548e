"""The interface through which the scheduler stores messages in their subjects. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...protocol.http.posted import PostedMessage


class Subjects(Protocol):
    """Stores scheduled messages in their subjects when they are due."""

    async def choose_logical_partition(self, subject: str, subject_id: int) -> int:
        """
        Choose a logical partition whose partition currently accepts messages.

        Args:
            subject_id: the id of the subject, or 0 if it is unknown.

        Raises:
            SubjectDeletedError: the subject was deleted.
            KeylaneError: no partition accepts messages at present.
        """
        ...

    async def store(
        self,
        subject: str,
        messages: Sequence[PostedMessage],
        *,
        sent_at_ns: Sequence[int],
        key: str,
        logical_partition: int,
        subject_id: int,
        tried: bool,
    ) -> None:
        """
        Store messages without keys as one batch with an idempotency key, so that a repeated call
        does not store them twice.

        Args:
            tried: True if an earlier call may have stored them.

        Raises:
            SubjectDeletedError: the subject was deleted.
            MessageTooLargeError: some messages exceed the subject's limit. Nothing is stored, and
                nothing was stored by an earlier call.
            KeylaneError: nothing was stored, or the fate is UNKNOWN.
        """
        ...
