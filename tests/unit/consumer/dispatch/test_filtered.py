"""Handlers get the messages that the filter accepts; the others count as handled."""

from __future__ import annotations

from typing import Any

import pytest

from keylane.consumer.dispatch.handlers import await_result, filtered, filtered_batches, is_async
from keylane.consumer.filter import MessageFilter
from keylane.protocol.errors import FilterError
from keylane.protocol.message import Message


def message(value: bytes) -> Message:
    return Message("s", b"k", value, 0, 1, 0)


def is_even(message: Message) -> bool:
    return int(message.value) % 2 == 0


WANTED = MessageFilter(wanted=is_even)


async def test_handlers_of_both_kinds_get_what_is_wanted():
    handled: list[bytes] = []

    def handle(message: Message) -> str:
        handled.append(message.value)
        return message.value.decode()

    async def handle_async(message: Message) -> str:
        return handle(message)

    plain, asynchronous = filtered(handle, WANTED), filtered(handle_async, WANTED)
    assert (is_async(plain), is_async(asynchronous)) == (False, True)
    results: list[Any] = [plain(message(b"1")), plain(message(b"2"))]
    results += [await asynchronous(message(value)) for value in (b"3", b"4")]
    assert results == [None, "2", None, "4"]
    assert handled == [b"2", b"4"]
    with pytest.raises(FilterError):
        plain(message(b"x"))


async def test_batch_handler_gets_what_is_wanted_or_is_not_called():
    batches: list[list[bytes]] = []

    async def handle(messages: list[Message]) -> None:
        batches.append([message.value for message in messages])

    run = filtered_batches(handle, WANTED)
    await await_result(run([message(b"1"), message(b"2"), message(b"4")]))
    await await_result(run([message(b"1")]))
    assert batches == [[b"2", b"4"]]
