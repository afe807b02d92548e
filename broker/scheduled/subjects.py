"""Where scheduled messages go when their time has come: a logical partition for a batch, and its
storing.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...protocol.http.posted import PostedMessage


class Subjects(Protocol):
    """Where messages go whose time has come."""

    async def place(self, subject: str, subject_id: int) -> int:
        """
        A logical partition whose partition takes messages now.

        Args:
            subject_id: which subject of the name; 0: not known.

        Raises:
            SubjectDeletedError: this subject was deleted.
            KeylaneError: there is none now.
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
        Store messages without keys as one batch under an idempotency key; a repeat is stored once.

        Args:
            tried: an earlier call may have stored them.

        Raises:
            SubjectDeletedError: this subject was deleted.
            MessageTooLargeError: messages are over the limit of the subject; nothing is stored, nor
                was by an earlier try.
            KeylaneError: nothing is stored, or its fate is UNKNOWN.
        """
        ...
