"""Messages: properties there and back, and sizes."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

import numpy as np
import pytest

from keylane.protocol.errors import CorruptBatchError, InvalidRequestError, MessageTooLargeError
from keylane.protocol.limits import KEY_BYTES_MAX, MESSAGE_BYTES_MAX, PROPERTIES_BYTES_MAX
from keylane.protocol.message import Message, check_message_size, pack_properties, unpack_properties


def message(packed: bytes) -> Message:
    return Message("s", b"k", b"v", 0, 1, 2, packed_properties=packed)


@pytest.mark.parametrize(
    "properties",
    [{}, {"a": "b"}, {"a": b"\xff\0", "b": b"", "c": "b"}, {"": "", "ключ": "値", "z" * 99: "\0"}],
)
def test_properties_come_back(properties):
    """What the sender gave is what the handler sees."""
    assert message(pack_properties(properties)).properties == properties
    assert unpack_properties(pack_properties(properties)) == properties


class Text(str):
    """As text that a template or numpy gives."""

    __slots__ = ()


class Raw(bytes):
    """As the bytes of numpy."""


class Numbered(StrEnum):
    """Its members are text, and have a number for their value."""

    TILL = ("till-3", 3)

    def __new__(cls, text: str, number: int) -> Self:
        made = str.__new__(cls, text)
        made._value_ = number
        return made


def test_properties_of_derived_classes_arrive_as_plain_text_and_bytes():
    given = {Text("a"): Text("b"), "c": Raw(b"d"), Numbered.TILL: Numbered.TILL, "e": "f"}
    arrived = message(pack_properties(given)).properties
    assert arrived == {"a": "b", "c": b"d", "till-3": "till-3", "e": "f"}
    assert {type(part) for pair in arrived.items() for part in pair} == {str, bytes}


def test_no_properties_cost_nothing():
    """None and an empty mapping take no bytes."""
    assert pack_properties(None) == pack_properties({}) == b""


def test_properties_are_read_only():
    """A handler cannot change a message's properties under another's feet."""
    with pytest.raises(TypeError):
        message(pack_properties({"a": "b"})).properties["a"] = "c"


@pytest.mark.parametrize(
    "properties",
    [
        {"a": 1},
        {1: "a"},
        {"a": None},
        {b"a": "b"},
        {"a": "\ud800"},
        {"a": bytearray(b"b")},
        [("a", "b")],
    ],
)
def test_properties_that_no_consumer_could_read_are_refused(properties):
    """A property that is not text is refused at the sender."""
    with pytest.raises(InvalidRequestError):
        pack_properties(properties)


def test_properties_over_their_limit_are_refused():
    """64 KiB of properties are the most; the error says how many there are."""
    with pytest.raises(MessageTooLargeError, match="properties too large: 65544 bytes, at most"):
        pack_properties({"a": "x" * PROPERTIES_BYTES_MAX})


@pytest.mark.parametrize(
    "packed", [b"\xc1", b"\x01", b"\x81\xa1a\x01", b"\x81\xa1a", b"\x81\xa1\xff\xa0"]
)
def test_unreadable_properties_are_a_typed_error(packed):
    """Bytes that are no properties raise CorruptBatchError where they are looked at."""
    with pytest.raises(CorruptBatchError):
        _ = message(packed).properties


@pytest.mark.parametrize("tags", [("paid",), ["paid", "eu"], ("ключ", "a b")])
def test_tags_come_back_when_there_are_properties_or_none(tags):
    """In their order, beside the properties; a message that is sent on with its properties keeps
    its tags.
    """
    packed = pack_properties({"a": b"b"}, tags)
    assert message(packed).tags == tuple(tags)
    assert message(packed).properties["a"] == b"b"
    assert message(pack_properties(message(packed).properties)).tags == tuple(tags)
    assert message(pack_properties(None, tags)).tags == tuple(tags)


def test_error_of_bad_text_names_tags_or_properties():
    """The text of tags was called a property."""
    with pytest.raises(InvalidRequestError, match=r"a tag is invalid: 'eu,a\\ud800'"):
        pack_properties({"a": "b"}, ["eu", "a\ud800"])
    with pytest.raises(InvalidRequestError, match=r"a property is invalid: 'b\\ud800'"):
        pack_properties({"a": "b\ud800"}, ["eu"])


def test_tags_are_refused_when_they_cannot_be_iterated():
    """An array without a dimension says that it can, and raised a TypeError."""
    with pytest.raises(InvalidRequestError, match="tags are texts"):
        pack_properties(None, np.array("eu"))


def test_tags_may_be_an_array():
    """As those of a consumer; one of several has no truth."""
    for tags in (["eu"], ["eu", "us"]):
        assert pack_properties(None, np.array(tags)) == pack_properties(None, tags)


@pytest.mark.parametrize("properties", [None, {"a": "b"}, {"keylane.tags": b"\xff"}])
def test_message_has_no_tags_when_none_were_given(properties):
    assert message(pack_properties(properties)).tags == ()


@pytest.mark.parametrize("tags", ["paid", b"paid", [""], ["a,b"], [5], {"a": "b"}, [b"paid"]])
def test_tags_are_refused_when_they_are_no_texts_without_commas(tags):
    with pytest.raises(InvalidRequestError, match="tags are texts"):
        pack_properties(None, tags)


def test_tags_are_refused_when_a_property_has_them_already():
    with pytest.raises(InvalidRequestError, match="twice"):
        pack_properties({"keylane.tags": "a"}, ["b"])


def test_sizes_up_to_the_limits_pass_and_one_more_does_not():
    """A key of 1 KiB and a message of 1 MiB in all pass; a byte more is refused."""
    check_message_size(KEY_BYTES_MAX, MESSAGE_BYTES_MAX - KEY_BYTES_MAX - 5, 5)
    with pytest.raises(MessageTooLargeError, match="order key") as told:
        check_message_size(KEY_BYTES_MAX + 1, 0, 0)
    assert str(told.value).count("digest") == 1, "one piece of advice: send a digest"
    with pytest.raises(MessageTooLargeError):
        check_message_size(KEY_BYTES_MAX, MESSAGE_BYTES_MAX - KEY_BYTES_MAX - 5, 6)


def test_message_prints_short_however_large_it_is():
    """Where it is, the first bytes of key and value with their lengths, and the attempt."""
    small = Message("orders", b"customer-7", b"paid", 17, 3, 2, attempt=4)
    assert (
        repr(small)
        == str(small)
        == (
            "<Message of orders partition 3 offset 17, key b'customer-7' (10 bytes), "
            "value b'paid' (4 bytes), attempt 4>"
        )
    )
    large = Message("s" * 200, b"\xff" * 1024, b"\x1b" * MESSAGE_BYTES_MAX, 2**63 - 1, 3, 2)
    assert len(repr(large)) < 700
    assert f"… ({MESSAGE_BYTES_MAX} bytes)" in repr(large)
    assert repr(large).isprintable()


def test_message_is_a_member_of_sets_by_its_place():
    """Equal messages have one place; another try of a message is another one."""
    first = Message("s", b"k", b"v", 7, 1, 0)
    same, later = Message("s", b"k", b"v", 7, 1, 0), Message("s", b"k", b"v", 8, 1, 0)
    assert {first, same, later} == {first, later}
    assert hash(first) == hash(Message("s", b"k", b"v", 7, 1, 0, attempt=2))


@pytest.mark.parametrize("name", ["keylane.source", "keylane.", "keylane.later"])
def test_property_of_a_name_that_is_keylanes_own_is_refused(name):
    """Cut-overs and comparisons trust these; of a message that is sent on tags and the mark of an
    edit stay true.
    """
    with pytest.raises(InvalidRequestError, match=f"reserved: leave out '{name}'"):
        pack_properties({"a": "b", name: "3/5"})
    sent_on = {"keylane.tags": "paid", "keylane.edited": "2026-11-28T00:00:00Z", "keylane": "x"}
    assert unpack_properties(pack_properties(sent_on)) == sent_on
    assert unpack_properties(pack_properties({name: "3/5"}, kept=[name])) == {name: "3/5"}
