"""Checks messages that a program passes back to its consumer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..protocol.errors import InvalidRequestError
from ..protocol.message import Message, not_delivered_error
from ..rpc.loop_binding import LoopBinding


def shell_of(message: Message[Any]) -> Any:
    """Return the shell of the partition under whose lease a message was handed out, or None."""
    return None if message.delivery is None else message.delivery.shell


def to_list(messages: Iterable[Message[Any]]) -> list[Message[Any]]:
    """Return the argument of a consumer's `ack` or `nack` as a list. Raises InvalidRequestError if
    it is not an iterable of messages.
    """
    if isinstance(messages, Message):
        raise InvalidRequestError(
            "a consumer acks a list of messages: consumer.ack([message]); or message.ack()"
        )
    try:
        return list(messages)
    except TypeError:
        raise InvalidRequestError(
            f"a consumer acks a list of messages, not {messages!r:.60}"
        ) from None


def check_handed_out(messages: Iterable[Message[Any]], loop_binding: LoopBinding) -> None:
    """Raise InvalidRequestError or ClosedError unless the consumer of `loop_binding` handed the
    messages out to its program.
    """
    checked: object = None
    for message in messages:
        if not isinstance(message, Message):
            raise InvalidRequestError(f"only messages can be acked, not {message!r:.60}")
        delivery = message.delivery
        if delivery is not None and delivery is checked:
            continue
        checked = delivery
        if delivery is None:
            raise not_delivered_error("this message")
        shell: Any = delivery.shell
        if shell is None:
            raise delivery.ack_error(message, "this message")
        if shell.calls.connections.loop_binding is not loop_binding:
            raise InvalidRequestError(f"{message!r} was handed out by another consumer")
        if not shell.owner.by_hand:
            raise in_handler_error(message)


def in_handler_error(message: Message[Any]) -> InvalidRequestError:
    """Return the error for acking or nacking a message that is in a handler."""
    error = InvalidRequestError(
        f"message {message.offset} of partition {message.partition_id} was given to a handler, "
        "whose return acks it: ack() and nack() are for messages that the program takes itself"
    )
    error.hint = (
        "Remove the call from the handler: return to ack the message, or raise keylane.Retry or "
        "return keylane.NACK to have it retried. To ack messages yourself, create the consumer "
        "without a handler."
    )
    return error
