"""The interface through which the scheduler stores messages in their subjects. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...protocol.http.posted import PostedMessage


class Subjects(Protocol):
    """Stores scheduled messages in their subjects when they are due."""

    async def choose_logical_partition(self, subject: str, subject_id: int) -> int:
        """
        Choose a logical partition whose partition accepts messages now.

        Args:
            subject_id: the id of the subject, or 0 if it is unknown.

        Raises:
            SubjectDeletedError: the subject was deleted.
            KeylaneError: no partition accepts messages now.
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
        Store messages without keys as one batch under an idempotency key, so a repeated call does
        not store them twice.

        Args:
            tried: True if an earlier call may have stored them.

        Raises:
            SubjectDeletedError: the subject was deleted.
            MessageTooLargeError: messages exceed the limit of the subject; nothing is stored, not
                even by an earlier call.
            KeylaneError: nothing is stored, or the fate is UNKNOWN.
        """
        ...
