"""Which messages a consumer's filter accepts, and what happens if it fails."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from keylane.consumer.filter import MessageFilter, build_filter, check_tags
from keylane.protocol.errors import ConfigError, FilterError
from keylane.protocol.limits import FILTER_CHARS_MAX
from keylane.protocol.message import Message, pack_properties


def message(*tags: str, **properties: str | bytes) -> Message:
    return Message("s", b"k", b"v", 5, 1, 0, packed_properties=pack_properties(properties, tags))


def wants_big(message: Message) -> bool:
    return len(message.value) > 100


@pytest.mark.parametrize(
    ("given", "passes"),
    [
        (message("paid"), True),
        (message("new", "paid"), True),
        (message("prepaid"), False),
        (message("new", country="paid"), False),
        (message(country="paid"), False),
        (message(), False),
    ],
)
def test_message_passes_with_one_of_the_tags(given: Message, passes: bool):
    """Only whole tags count, and no other property."""
    assert MessageFilter(tags=["void", "paid"]).matches(given) is passes


def test_message_passes_with_all_of_the_properties():
    wanted = MessageFilter(wanted={"country": "DE", "raw": b"\x01"})
    assert wanted.matches(message("new", country="DE", raw=b"\x01", more="x"))
    assert not wanted.matches(message(country="DE"))
    assert not wanted.matches(message(country="DE", raw="\x01"))


def test_function_is_asked_only_of_messages_with_the_tags():
    seen: list[Message] = []
    wanted = MessageFilter(["paid"], seen.append)
    assert not wanted.matches(message("new"))
    assert not seen
    assert not wanted.matches(message("paid"))
    assert len(seen) == 1


async def is_async(message: Message) -> bool:
    return True


def fails(message: Message) -> bool:
    raise LookupError("no table")


@pytest.mark.parametrize("function", [fails, lambda message: is_async(message)])  # noqa: PLW0108
def test_error_names_the_message_when_the_function_fails(function: Any):
    """Also if its result would have to be awaited, because that would accept every message."""
    wanted = MessageFilter(wanted=function)
    with pytest.raises(FilterError) as caught:
        wanted.matches(message())
    assert (caught.value.partition_id, caught.value.offset) == (1, 5)
    assert not wanted.rejects(message()), "what cannot be told is not passed over"


def test_error_is_told_when_the_properties_are_not_readable():
    bad = Message("s", b"k", b"v", 5, 1, 0, packed_properties=b"\xc1 paid")
    with pytest.raises(FilterError):
        MessageFilter(["paid"]).matches(bad)


@pytest.mark.parametrize("wanted", [{}, {1: "x"}, {"x": 1}, "country = 'DE'", 7, is_async])
def test_filter_is_refused_that_cannot_work(wanted: Any):
    with pytest.raises(ConfigError):
        MessageFilter(wanted=wanted)


def test_text_is_the_same_for_the_same_filter():
    """Members of a group are compared by it: order does not matter, and long texts remain
    different.
    """
    assert MessageFilter(["b", "a"]).text == MessageFilter(["a", "b"]).text == "tags a, b"
    described = MessageFilter(["a"], {"y": b"1", "x": "2"}).text
    assert described == "tags a; x = '2'; y = b'1'"
    assert MessageFilter(wanted=wants_big).text == "function wants_big"
    assert MessageFilter(wanted=partial(wants_big)).text == "function partial"
    first, second = (MessageFilter([*(f"{n:0190}" for n in range(5)), end]).text for end in "xy")
    assert first != second
    assert max(len(first), len(second)) <= FILTER_CHARS_MAX
    assert build_filter(None, None) is None


@pytest.mark.parametrize(
    "tags", ["paid", b"paid", [], [""], ["a,b"], [1], ["x" * 201], ["\ud800"], ["x"] * 101]
)
def test_tags_are_refused_that_no_message_can_have(tags):
    with pytest.raises(ConfigError):
        check_tags(tags)


def test_tags_are_sorted_and_each_once():
    assert check_tags(["paid", "new", "paid"]) == ("new", "paid")


def test_lambdas_are_told_apart_by_their_code_and_not_by_their_place():
    paid, same = (
        MessageFilter(
            wanted=lambda message: b"paid" in message.value and message.key in {b"a", b"b"}
        ),
        MessageFilter(
            wanted=lambda message: b"paid" in message.value and message.key in {b"a", b"b"}
        ),
    )
    other = MessageFilter(wanted=lambda message: b"new" in message.value)
    nested = [
        MessageFilter(wanted=lambda message: any(each == 1 for each in message.value)),
        MessageFilter(wanted=lambda message: any(each == 2 for each in message.value)),
    ]
    assert paid.text == same.text
    assert len({paid.text, other.text, *(each.text for each in nested)}) == 4
