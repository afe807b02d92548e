"""What follows the messages of this process, if anything does: `keylane.otel` installs it here.

    a producer, an outbox ─▶ begin_send, create   what is sent carries a context in its properties
    a consumer            ─▶ begin_handling, note_received, begin_ack

A client asks for it once at each opening, so that a process in which nothing is installed pays
nothing for a message; an outbox, which need not be open, asks whenever it adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from ..protocol.errors import MessageTooLargeError
from ..protocol.message import Delivery, Message, Receipt, pack_properties

Properties = Mapping[str, str | bytes]
EndTrace = Callable[[BaseException | None], None]
"""Ends a trace, with the error that ended what it follows, or None."""


class SendTrace(Protocol):
    """Follows messages that are sent in the same context."""

    fields: Mapping[str, str]
    """The properties that carry the context to the consumers; empty if the messages have one of
    their own.
    """
    is_recording: bool
    """False: nothing becomes of what is noted."""

    def note_stored(self, receipt: Receipt, message_count: int) -> None:
        """Note that a broker has stored a message, and those before it in its batch.
        `message_count` is the number of messages in all batches.
        """
        ...

    def end(self, message_count: int, error: BaseException | None = None) -> None:
        """Note that all messages have an outcome; `error` is that of one which is not stored."""
        ...


class HandlingTrace(Protocol):
    """Follows a message, or a batch, through its handler."""

    def attach(self) -> Any:
        """Let what the caller does next be a part of the handling. Return a token for `detach`."""
        ...

    def detach(self, token: Any) -> None:
        """Undo `attach`, in the same task or thread."""
        ...

    def end(self, error: BaseException | None = None, *, is_retried: bool = False) -> None:
        """Note that the handler has ended; `is_retried` if it has asked for another attempt."""
        ...


class Tracing(Protocol):
    """Makes the traces of a process. Its methods raise nothing."""

    def context_id(self) -> int:
        """Return a number that is the same while the context of the caller is the same object."""
        ...

    def has_context(self, properties: Properties) -> bool:
        """Return True if the sender has put a context of its own into the properties."""
        ...

    def begin_send(self, subject: str, properties: Properties | None) -> SendTrace:
        """Begin to follow messages that are sent in the present context, or in the context that
        `properties` have.
        """
        ...

    def create(self, subject: str, properties: Properties | None) -> Mapping[str, str]:
        """Note that a message is created, which is sent later. Return the properties that carry
        its context, as `SendTrace.fields` does.
        """
        ...

    def begin_send_created(
        self, subject: str, partition_id: int, packed: Sequence[bytes]
    ) -> EndTrace | None:
        """Begin to follow a batch of created messages, given by their packed properties; None if
        none of them is followed.
        """
        ...

    def begin_handling(self, given: Message | Sequence[Message]) -> HandlingTrace:
        """Begin to follow a message or a batch that a handler gets now."""
        ...

    def note_received(self, messages: Sequence[Message]) -> None:
        """Note that the program has got messages it has asked for."""
        ...

    def begin_ack(self, delivery: Delivery, ranges: Collection[tuple[int, int]]) -> EndTrace | None:
        """Begin to follow an ack of the offsets in `ranges`; None if none of the messages is
        followed.
        """
        ...


_installed: list[Tracing] = []


def install(tracing: Tracing | None) -> None:
    """Let clients that are opened from now on use `tracing`; None: they trace nothing."""
    _installed[:] = [] if tracing is None else [tracing]


def current_tracing() -> Tracing | None:
    """Return what a client that is being opened traces with."""
    return _installed[0] if _installed else None


def add_fields(
    fields: Mapping[str, str],
    packed: bytes,
    properties: Properties | None,
    tags: Collection[str],
    limit_bytes: int,
) -> bytes:
    """
    Return packed properties with `fields`, or `packed` where a limit has no room for them: no
    message is refused because it is traced.

    Args:
        packed: what `pack_properties(properties, tags)` has returned.
        limit_bytes: the largest size that the packed properties may have.
    """
    if not fields:
        return packed
    try:
        given = {} if properties is None else dict(properties.items())
        joined = pack_properties({**given, **fields}, tags)
    except MessageTooLargeError:
        return packed
    return joined if len(joined) <= limit_bytes else packed
