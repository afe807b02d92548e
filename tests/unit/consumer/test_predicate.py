"""Which functions can be a filter's predicate: those that may accept a message."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from typing import Any

import pytest

from keylane.consumer.predicate import check_predicate
from keylane.protocol.errors import ConfigError

EXPECTED = "filter is a plain function of a message"


def forgets(message: Any) -> Any:
    message.key == b"paid"  # noqa: B015 - the mistake that is tested


def forgets_in_branches(message: Any) -> Any:
    if not message.key:
        return
    return None


def forgets_in_blocks(message: Any) -> Any:
    with contextlib.suppress(ValueError):
        return None
    try:
        message.decode()
    except ValueError:
        return
    finally:
        message.clear()


class Forgets:
    def __call__(self, message: Any) -> None:
        message.decode()

    def method(self, message: Any) -> None:
        message.decode()


def sometimes(message: Any) -> Any:
    if message.key:
        return True
    return None


def either(message: Any) -> Any:
    return message.key or None


def either_in_a_block(message: Any) -> Any:
    with contextlib.suppress(ValueError):
        return message.key or None


def by_a_variable(message: Any) -> Any:
    wanted = None
    return wanted  # noqa: RET504 - a constant would be refused


def raises(message: Any) -> Any:
    raise LookupError


def generates(message: Any) -> Any:
    yield True


async def is_async(message: Any) -> bool:
    return True


class AsyncWanted:
    async def __call__(self, message: Any) -> bool:
        return True


def of_two(first: Any, second: Any) -> bool:
    return True


class Wanted:
    def __call__(self, message: Any) -> bool:
        return True

    def method(self, message: Any) -> bool:
        return True


@pytest.mark.parametrize(
    "predicate",
    [
        forgets,
        forgets_in_branches,
        forgets_in_blocks,
        Forgets(),
        Forgets().method,
        partial(forgets),
        lambda message: None,
    ],
)
def test_predicate_is_refused_when_it_never_returns_a_value(predicate: Any):
    """It would reject every message, and each would be acked without a handler."""
    with pytest.raises(ConfigError, match="never returns a value") as caught:
        check_predicate(predicate, EXPECTED)
    assert "Return True" in caught.value.hint


@pytest.mark.parametrize("predicate", [lambda: True, of_two, partial(of_two, 1, 2), Wanted.method])
def test_predicate_is_refused_when_it_does_not_take_one_message(predicate: Any):
    with pytest.raises(ConfigError, match="does not take one"):
        check_predicate(predicate, EXPECTED)


@pytest.mark.parametrize(
    "predicate", [generates, partial(generates), is_async, AsyncWanted(), 7, None]
)
def test_predicate_is_refused_when_a_call_does_not_run_it(predicate: Any):
    with pytest.raises(ConfigError, match="filter is a plain function of a message, not"):
        check_predicate(predicate, EXPECTED)


@pytest.mark.parametrize(
    "predicate",
    [
        sometimes,
        either,
        either_in_a_block,
        by_a_variable,
        raises,
        Wanted(),
        Wanted().method,
        partial(of_two, 1),
        lambda message: re.match(b"paid", message.value),
        lambda message, wanted=b"paid": message.value == wanted,
        lambda *messages: True,
        [].append,
        {b"a"}.__contains__,
        bool,
    ],
)
def test_predicate_passes_when_it_may_return_a_value(predicate: Any):
    """Also if it returns None at times, as `re.match` does."""
    check_predicate(predicate, EXPECTED)
