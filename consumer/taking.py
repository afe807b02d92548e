"""The ways in which a program takes messages of a consumer without a handler: one by one, many, as Arrow data."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from threading import get_ident
from typing import Any, Generic

from ..protocol.codecs.codec import V
from ..protocol.errors import ClosedError, ConfigError
from ..protocol.message import Message
from ..protocol.routing import ConsumeStrategy
from ..protocol.settings import range_problems, refuse_call
from ..rpc.home import Home
from .handling.arrow_batch import ArrowBatch, check_arrow
from .handling.stream import NEXTS, Stream
from .handling.taken import ack_all, check_handed_out, count_try, listed, nack_all
from .handling.workers import Workers
from .settings import RECORDS_MAX, ConsumerSettings, FailurePolicy

GETMANY_MS_MAX = 600_000


class Taking(Generic[V]):
    """The part of a consumer that gives messages to the program."""

    _home: Home
    _settings: ConsumerSettings
    _dispatch: Workers | Stream | None

    async def getmany(
        self, *, max_records: int | None = None, timeout_ms: int = 1_000
    ) -> list[Message[V]]:
        """
        Take several messages at once, also of one key; `ack` takes them when they are handled.

        Messages of a partition and a key come in their order.  Until they are acked or given back, later messages of
        their keys do not come; several tasks may each work on what they took.

        Args:
            max_records: 1 to 100_000; by default that of the settings.
            timeout_ms: 0 to 600_000; milliseconds to wait for a first message.

        Returns:
            What is there, as soon as there is one message; none if none came in time.

        Raises:
            OtherTaskError: another task waits for messages.
            MixedUseError: the consumer gave messages in another way since it was opened, as by `async for`.
            ClosedError: the consumer is not open, was closed meanwhile, or has a handler.
            InvalidRequestError: an argument out of its range; nothing was taken.
            KeylaneError: the error that ended the consumer.
        """
        most = self._settings.max_records if max_records is None else max_records
        refuse_call(
            range_problems(
                {"max_records": most, "timeout_ms": timeout_ms},
                {"max_records": (1, RECORDS_MAX), "timeout_ms": (0, GETMANY_MS_MAX)},
            )
        )
        try:
            return await self._stream.take_many(most, timeout_ms)
        except StopAsyncIteration:
            raise ClosedError("the consumer was closed") from None

    def ack(self, messages: Iterable[Message[V]]) -> Coroutine[Any, Any, None]:
        """
        Ack messages that `getmany` or the iteration gave, as `message.ack` does for one.

        Raises:
            InvalidRequestError: a message is not this consumer's, or was given back and comes again; nothing is acked.
            LeaseLostError: other consumers have some of the messages now; the others are acked.
            ClosedError: no consumer handed a message out.
        """
        acked = listed(messages)
        if not isinstance(self._dispatch, Stream):
            check_handed_out(acked, self._home)
        return self._ack(acked)

    async def _ack(self, messages: list[Message[Any]]) -> None:
        if not (isinstance(self._dispatch, Stream) and self._dispatch.ack_hand(messages)):
            await ack_all(messages, self._home)

    def nack(
        self, messages: Iterable[Message[V]], *, after_s: float = 0
    ) -> Coroutine[Any, Any, None]:
        """
        Give messages back, as `message.nack` does for one; those that are acked stay so.

        With each message, later ones of its key that are in hand are given back too: none comes past another.

        Raises:
            InvalidRequestError: a message is not this consumer's, or `after_s` is no number of seconds up to a day; nothing
                is given back.
            LeaseLostError: other consumers have some of the messages now; the others are given back.
            ClosedError: no consumer handed a message out.
        """
        given_back = listed(messages)
        if not isinstance(self._dispatch, Stream):
            check_handed_out(given_back, self._home)
        return nack_all(given_back, self._home, after_s)

    def batches(self) -> AsyncIterator[ArrowBatch]:
        """
        Iterate over messages as Arrow record batches; needs pyarrow and numpy.

        Of each partition one batch at a time is in hand: the next one comes once it is acked.

        Raises:
            ConfigError: pyarrow is not installed, the group is shared, or `on_failure` is not "block".
            ClosedError, MixedUseError, OtherTaskError, KeylaneError: as of `getmany`.
        """
        if self._settings.consume_strategy is ConsumeStrategy.SHARED:
            raise ConfigError("batches() are of exclusive groups; a shared one has no ranges")
        policy = self._settings.failure_policy
        if policy is not FailurePolicy.BLOCK:
            raise ConfigError(
                f"on_failure={policy.value!r} is of messages: what is wrong with one of a batch of "
                "Arrow data only its reader knows"
            )
        check_arrow()
        return BatchIteration(lambda: self._stream)

    def _note_error(self, error: BaseException | None) -> None:
        """Note that the block of the consumer ends, with `error`: it may be that of the message in hand."""
        if error is not None and isinstance(self._dispatch, Stream) and self._home.here:
            count_try(self._dispatch, error)

    def _put_back(self, taken: Message[Any] | list[Message[Any]] | ArrowBatch) -> None:
        """Take back what was given to a program that never saw it, as it was interrupted: it comes again next."""
        if isinstance(self._dispatch, Stream):
            self._dispatch.put_back(taken)

    @property
    def _stream(self) -> Stream:
        """Gives messages to the program.  Raises ClosedError."""
        if not isinstance(self._dispatch, Stream):
            raise ClosedError(
                "the consumer is not open, or it has a handler that gets the messages"
            )
        return self._dispatch

    def __aiter__(self) -> AsyncIterator[Message[V]]:
        return Iteration(self._home, lambda: self._stream)

    def __anext__(self) -> Coroutine[Any, Any, Message[V]]:
        """
        The next message, for a consumer without a handler.

        Raises:
            StopAsyncIteration: the consumer is closed.
            OtherTaskError: another task waits for a message, or runs with a message that it has not acked.
            ClosedError: the consumer was never opened, or has a handler.
            ForkedError, OtherLoopError: it is open elsewhere.
            KeylaneError: the error that ended the consumer.
        """
        self._home.check_thread()
        step: Coroutine[Any, Any, Message[Any]] = self._stream.next()
        return step


class BatchIteration:
    """
    The Arrow batches of a consumer.  It is no generator, which a cancelled `anext` would end.

    Args:
        stream: of the consumer; raises an error if there is none.
    """

    def __init__(self, stream: Callable[[], Stream]) -> None:
        self._stream = stream
        self._known: Stream | None = None
        """The one that gives the batches: a consumer that was closed and opened again has another."""

    def __aiter__(self) -> BatchIteration:
        return self

    async def __anext__(self) -> ArrowBatch:
        """As `Stream.take_arrow`."""
        if self._known is None:
            self._known = self._stream()
        return await self._known.take_arrow()


class Iteration:
    """
    The messages of a consumer, one by one.

    Args:
        home: of the consumer.
        stream: of the consumer; raises an error if there is none.
    """

    def __init__(self, home: Home, stream: Callable[[], Stream]) -> None:
        self._home = home
        self._stream = stream
        self._known: Stream | None = None
        """The one that gave the last message; once it is closed it gives none alone."""

    def __aiter__(self) -> Iteration:
        return self

    async def __anext__(self) -> Message[Any]:
        """As `Stream.next`."""
        known = self._known
        if known is not None and get_ident() == self._home.thread:
            message = known.take_alone()
            if message is not None:
                return message
        self._known = stream = self._stream()
        self._home.check_thread()
        return await stream.next()


NEXTS.add(Iteration.__anext__.__code__)
