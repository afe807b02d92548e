"""The interface to the subjects that scheduled messages are stored in: it chooses a logical
partition for a batch, and stores the batch. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...protocol.http.posted import PostedMessage


class Subjects(Protocol):
    """The subjects that receive messages whose time has come."""

    async def choose_logical_partition(self, subject: str, subject_id: int) -> int:
        """
        Return a logical partition whose partition accepts messages now.

        Args:
            subject_id: the id of the subject of this name; 0 if it is not known.

        Raises:
            SubjectDeletedError: this subject was deleted.
            KeylaneError: there is no such partition now.
        """
        ...

    async def store(
        self,
        subject: str,
        messages: Sequence[PostedMessage],
        *,
        sent_at_ns: Sequence[int],
        key: str,
        logical: int,
        subject_id: int,
        tried: bool,
    ) -> None:
        """
        Store messages without keys as one batch under an idempotency key. A repeated call stores
        them once.

        Args:
            tried: an earlier call may have stored them.

        Raises:
            SubjectDeletedError: this subject was deleted.
            MessageTooLargeError: messages are over the limit of the subject; nothing is stored, and
                nothing was stored by an earlier try.
            KeylaneError: nothing is stored, or its fate is UNKNOWN.
        """
        ...
