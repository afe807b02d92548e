"""Acks, and returns, of many messages that a program has in hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from ...protocol.errors import ClosedError, InvalidRequestError, LeaseLostError
from ...protocol.message import Message
from ...rpc.home import Home
from ..pulling.pull_client import PullClient, client_of


async def ack_all(messages: list[Message[Any]], home: Home) -> None:
    """
    Ack messages of the consumer whose home this is.

    Raises:
        InvalidRequestError: a message is another consumer's, or was given back; nothing is acked.
        LeaseLostError: some are delivered to another consumer; the others are acked.
    """
    _check(messages, home)
    for message in messages:
        message.delivery.check_not_given_back(message)  # type: ignore[union-attr]
    lost: LeaseLostError | None = None
    acked: dict[PullClient, Message] = {}
    for message in messages:
        try:
            if message.delivery.take_ack(message):  # type: ignore[union-attr]
                acked[client_of(message)] = message
        except LeaseLostError as error:
            lost = lost or error
    waiting = [client for client in acked if client.acks_each]
    durable = await asyncio.gather(*(client.acked() for client in waiting))
    for client, is_durable in zip(waiting, durable, strict=True):
        if not is_durable:
            try:
                client.check_takes_acks(acked[client].offset)
            except LeaseLostError as error:
                lost = lost or error
    if lost is not None:
        raise lost


async def nack_all(messages: list[Message[Any]], home: Home, after_s: float) -> None:
    """
    Give messages back; those that are acked or given back already stay so.

    Raises:
        InvalidRequestError: a message is another consumer's; nothing is given back.
        LeaseLostError: some are delivered to another consumer; the others are given back.
        ConfigError: `after_s` is no such number.
    """
    _check(messages, home)
    lost: LeaseLostError | None = None
    for message in sorted(messages, key=lambda each: each.offset):
        try:
            if message.delivery.has_taken(message):  # type: ignore[union-attr]
                await message.nack(after_s=after_s)
        except LeaseLostError as error:
            lost = lost or error
    if lost is not None:
        raise lost


def _check(messages: Iterable[Message[Any]], home: Home) -> None:
    for message in messages:
        if not isinstance(message, Message):
            raise InvalidRequestError(f"acks are of messages, not of {message!r:.60}")
        client = getattr(message.delivery, "client", None)
        if not isinstance(client, PullClient):
            raise ClosedError("this message was read, not handed out by a consumer")
        if client.home is not home:
            raise InvalidRequestError(f"{message!r} was handed out by another consumer")
