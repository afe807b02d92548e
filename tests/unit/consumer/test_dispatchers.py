"""Handlers, batch handlers and threads that cannot be right are refused when the consumer is
made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from keylane import Consumer, ConsumerSettings, Message
from keylane.errors import ConfigError, HandlerTypeError
from support.consumer_options import consumer_options


async def handle(_given: Any) -> None: ...


def block(_given: Any) -> None: ...


def block_two(_one: Any, _two: Any) -> None: ...


@pytest.mark.parametrize(
    "wrong",
    [
        {"handler": handle, "batch_handler": handle},
        {"batch_handler": 7},
        {"batch_handler": block_two},
        {"batch_handler": dict},
        {"threads": 2},
        {"handler": handle, "threads": 2},
        {"handler": block, "threads": -1},
        {"handler": block, "threads": True},
        {"handler": block, "threads": 100_000},
        {"handler": block, "threads": 2, "concurrency": 2},
        {"max_records": 0},
        {"max_wait_ms": -1},
        {"max_records": "many"},
    ],
)
def test_impossible_calls_are_refused(wrong: dict[str, Any]):
    with pytest.raises((ConfigError, HandlerTypeError)):
        Consumer("127.0.0.1:1", **consumer_options(subject="s", group="g", **wrong))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"subject": "s"}, r"^group= is missing: Consumer\(meta, subject='s', group=\.\.\.\)"),
        ({"group": "g"}, r"^subject= is missing: Consumer\(meta, subject=\.\.\., group='g'\)"),
        ({"subject": ["s", "t"], "group": "g"}, r"^subject= takes one name; .*@consumer\.on\("),
    ],
)
def test_consumer_without_one_subject_and_one_group_is_refused_with_what_to_give(given, says):
    with pytest.raises(ConfigError, match=says) as refused:
        Consumer("127.0.0.1:1", **consumer_options(handler=handle, **given))
    assert "Names match" not in refused.value.hint


def test_handler_without_subject_and_group_is_refused():
    with pytest.raises(ConfigError, match="subject and a group"):
        Consumer("127.0.0.1:1", handler=handle)
    assert repr(Consumer("127.0.0.1:1")) == "<Consumer of 0 at 127.0.0.1:1, closed>"


def test_arguments_take_precedence_over_settings():
    consumer = Consumer(
        "127.0.0.1:1",
        subject="s",
        group="g",
        batch_handler=handle,
        tries_max=7,
        settings=ConsumerSettings(tries_max=9, max_wait_ms=3),
    )
    assert (consumer._options.settings.tries_max, consumer._options.settings.max_wait_ms) == (7, 3)


def of_a_list(messages: list[Message]) -> None: ...


def of_a_text_of_a_list(messages: Sequence[Message[bytes]]) -> None: ...


async def of_one(message: Message[bytes]) -> None: ...


def of_any(given: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "handler", "other"),
    [
        ("handler", of_a_list, "batch_handler="),
        ("handler", of_a_text_of_a_list, "batch_handler="),
        ("batch_handler", of_one, "handler="),
    ],
)
def test_handler_is_refused_when_it_is_annotated_as_one_of_the_other_kind(
    kind: str, handler: Any, other: str
):
    """It failed at the first message, and that message was tried without end."""
    with pytest.raises(HandlerTypeError, match=f"pass it as {other}"):
        Consumer(
            "127.0.0.1:1", **consumer_options(subject="orders", group="billing", **{kind: handler})
        )
    given: list[Any] = [(kind, of_any), ("handler", of_one), ("batch_handler", of_a_list)]
    for right, function in given:
        Consumer(
            "127.0.0.1:1",
            **consumer_options(subject="orders", group="billing", **{right: function}),
        )
