"""The seam to the network: what clients need of it, so that a simulation can stand in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from ..protocol.frames import Answer, Request

T = TypeVar("T")


class Channel(Protocol):
    """One connection to a broker's data plane; calls are pipelined and answered in any order."""

    async def call(
        self, request: Request, payload: bytes = b"", *, timeout_ms: int
    ) -> tuple[Answer, memoryview]:
        """
        Send one request, wait for its answer.  Calls made one after another without an await between them
        arrive in that order.

        Raises:
            RefusedError and its kin: the broker's answer.
            NotSentError: the channel was closed before.
            OutcomeUnknownError: it broke, or `timeout_ms` passed.
        """
        ...

    @property
    def closed(self) -> bool:
        """True once it cannot carry calls any more."""
        ...

    async def close(self) -> None:
        """Close the connection; calls under way fail with OutcomeUnknownError."""
        ...


class Network(Protocol):
    """Opens channels and makes control calls."""

    async def open_channel(self, address: str, *, timeout_ms: int) -> Channel:
        """A channel to the broker at `address`.  Raises NotSentError."""
        ...

    async def control(
        self,
        method: str,
        address: str,
        path: str,
        answer: type[T],
        *,
        body: object = None,
        query: Mapping[str, str] | None = None,
        timeout_ms: int,
    ) -> T:
        """
        One JSON call; `body` is encoded, the answer decoded as `answer`.

        Raises:
            RefusedError and its kin: the server's answer.
            NotSentError, OutcomeUnknownError: no answer.
            ForeignServerError: an answer, and not a keylane server's.
        """
        ...

    async def close(self) -> None:
        """Let go of everything opened."""
        ...
