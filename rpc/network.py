"""The network interface for clients, which is implemented with aiohttp and by the simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from ..protocol.endpoints import only_reads
from ..protocol.errors import KeylaneError, OutcomeUnknownError
from ..protocol.frames import READING, Answer, Batches, Request

T = TypeVar("T")
Calling = asyncio.Future[tuple[Answer, memoryview]]
"""The future of a call: its answer, and the payload of the answer."""
OnAnswer = Callable[[Calling], object]
OnPart = Callable[[Answer, memoryview], object]
"""See `Channel.begin`."""


def is_answered(call: Calling) -> bool:
    """Return True if the call was answered without an error."""
    return call.done() and not call.cancelled() and call.exception() is None


def no_answer(method: str, path: str, text: str) -> OutcomeUnknownError:
    """Return the error for a control call that was sent but not answered."""
    if only_reads(method, path):
        return OutcomeUnknownError.of_read(text)
    return OutcomeUnknownError(text)


class Call:
    """A pending call. The caller waits for `future`, which the channel completes."""

    __slots__ = ("future", "kind", "on_answer", "on_part", "timeout_ms", "is_long_poll")

    def __init__(
        self,
        future: Calling,
        on_answer: OnAnswer | None,
        kind: type[Request],
        timeout_ms: int,
        on_part: OnPart | None = None,
    ) -> None:
        self.future = future
        self.on_answer = on_answer
        self.on_part = on_part
        self.kind = kind
        self.timeout_ms = timeout_ms
        self.is_long_poll = False
        """True for a long poll, which the server answers only when it has messages."""

    def deliver_part(self, answer: Answer, payload: memoryview) -> bool:
        """Deliver an answer that is followed by others. Return False if the answer is the last
        one.
        """
        if self.on_part is None or not (type(answer) is Batches and answer.more):
            return False
        if not self.future.done():
            self.on_part(answer, payload)
        return True

    def complete(self, result: tuple[Answer, memoryview]) -> None:
        """Complete the call with its answer."""
        if not self.future.done():
            self.future.set_result(result)
            if self.on_answer is not None:
                self.on_answer(self.future)

    def fail_unanswered(self, text: str) -> None:
        """Fail the call, whose outcome is unknown because the request was sent but not answered."""
        if self.kind in READING:
            self.fail(OutcomeUnknownError.of_read(text))
        else:
            self.fail(OutcomeUnknownError(text))

    def fail(self, error: KeylaneError) -> None:
        """Fail the call with this error."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # mark it as retrieved, because it may never be awaited
            if self.on_answer is not None:
                self.on_answer(self.future)


class Channel(Protocol):
    """A connection to a broker's data plane. Calls are pipelined, and may be answered in any
    order.
    """

    async def call(
        self, request: Request, payload: bytes = b"", *, timeout_ms: int
    ) -> tuple[Answer, memoryview]:
        """
        Send a request, and wait for its answer.

        Calls that are made without an `await` in between arrive at the broker in order.

        Raises:
            RefusedError, or a subclass: the broker refused the request.
            NotSentError: the channel was already closed.
            OutcomeUnknownError: the channel broke, or `timeout_ms` passed.
        """
        ...

    def begin(
        self,
        request: Request,
        payload: bytes | bytearray = b"",
        *,
        timeout_ms: int,
        on_answer: OnAnswer | None = None,
        on_part: OnPart | None = None,
    ) -> Calling:
        """
        Send a request immediately, and return the future of its answer, or of an error as in
        `call`.

        This needs no task. Cancelling the future discards the answer.

        Args:
            on_answer: called with the future when the answer or error arrives, in the same
                iteration of the event loop, or before `begin` returns if the request was not sent.
                (Callbacks of the future itself run one iteration later.) It is not called for a
                cancelled future, and must not raise.
            on_part: called in the same way with each answer that is followed by another, if the
                request asks for several answers. `timeout_ms` applies to all of them together.
        """
        ...

    @property
    def closed(self) -> bool:
        """True once the channel can carry no more calls."""
        ...

    async def close(self) -> None:
        """Close the connection. Calls in progress fail with OutcomeUnknownError."""
        ...


@runtime_checkable
class Gathering(Protocol):
    """A channel that can send all requests of one callback in a single write at the end of the
    callback.
    """

    def gather(self) -> None:
        """Hold back requests until `flush`."""
        ...

    def flush(self) -> None:
        """Write the requests that have been held back."""
        ...


class Network(Protocol):
    """Opens channels and makes control calls."""

    async def open_channel(self, address: str, *, timeout_ms: int) -> Channel:
        """Return a channel to the broker at `address`. Raises NotSentError."""
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
        new_connection: bool = False,
    ) -> T:
        """
        Make a JSON call: encode `body`, and decode the response as `answer`.

        Args:
            new_connection: use a new connection, because a pooled one may have been lost silently.

        Raises:
            RefusedError, or a subclass: the server refused the call.
            NotSentError, OutcomeUnknownError: there was no answer.
            ForeignServerError: the answer did not come from a keylane server.
        """
        ...

    async def is_accepting(self, address: str, *, timeout_ms: int) -> bool:
        """Return True if something accepts a connection at `address`, which a process that hangs
        does, too.
        """
        ...

    async def close(self) -> None:
        """Close everything that was opened."""
        ...


@runtime_checkable
class KnowsMetaservers(Protocol):
    """A network that sends its token to metaservers, but to no other server."""

    def add_metaservers(self, addresses: Sequence[str]) -> None:
        """Remember the addresses of metaservers."""
        ...
