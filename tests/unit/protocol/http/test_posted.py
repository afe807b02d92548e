"""What a body is read as, by its content type; sizes; idempotency keys."""

from __future__ import annotations

import json

import pytest

from keylane.protocol.batch import encode_batch
from keylane.protocol.errors import InvalidRequestError, MessageTooLargeError
from keylane.protocol.http.posted import PostedMessage, keyed_producer, posted_messages
from keylane.protocol.ids import KEYED_IDS
from keylane.protocol.limits import (
    BATCH_BYTES_MAX,
    CONTROL_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    POSTED_MESSAGES_MAX,
)
from keylane.protocol.message import unpack_properties

JSON = {"Content-Type": "application/json"}
LINES = {"Content-Type": "application/x-ndjson"}


@pytest.mark.parametrize("content", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_body_is_the_value_without_a_content_type_of_json(content):
    params = {"Content-Type": content, "key": "k"}
    assert posted_messages(b'{"value": 1}', params) == [PostedMessage(b"k", b'{"value": 1}', b"")]


def test_empty_body_is_an_empty_value():
    assert posted_messages(b"", {}) == [PostedMessage(b"", b"", b"")]


def test_object_array_and_lines_have_the_same_messages():
    objects = [{"key": "k", "value": "é", "properties": {"a": "b"}}, {"value": [1]}]
    lines = "\r\n".join(map(json.dumps, objects)).encode()
    first, second = posted_messages(lines, LINES)
    assert (first.key, first.value) == (b"k", "é".encode())
    assert unpack_properties(first.packed_properties) == {"a": "b"}
    assert second == PostedMessage(b"", b"[1]", b"")
    assert posted_messages(json.dumps(objects).encode(), JSON) == [first, second]
    assert posted_messages(json.dumps(objects[0]).encode(), JSON) == [first]


def test_bytes_of_a_header_that_are_no_text_are_the_key():
    header = b"\xff".decode("utf-8", "surrogateescape")
    assert posted_messages(b"v", {"Message-Key": header})[0].key == b"\xff"


@pytest.mark.parametrize(
    ("body", "params", "said"),
    [
        (b'[{"value": 1}, {"key": "k"}]', JSON, "message 1: "),
        (b'{"value": 1}\n\n{"value"', LINES, "message 1 is not a message"),
        (b'{"value": 1}\n\n{"key": "k"}', LINES, "message 1: "),
        (b'{"value": 1}', {**JSON, "key": "k"}, "is in its object"),
        (b"v", {"key": "k", "key_base64": "aw=="}, "more than once: key, key_base64"),
        (b"v", {"key": "\ud800"}, "is not text"),
    ],
)
def test_refusal_says_which_message_is_bad(body, params, said):
    with pytest.raises(InvalidRequestError, match=said):
        posted_messages(body, params)


def test_refusal_of_a_large_message_says_which():
    long = "k" * 1_025
    body = json.dumps([{"value": "v"}, {"key": long, "value": "v"}]).encode()
    with pytest.raises(MessageTooLargeError, match=r"message 1: order key too large") as raised:
        posted_messages(body, JSON)
    assert raised.value.size_bytes == 1_025


def test_every_body_fits_into_one_batch():
    """The smallest messages, the most of them, and one message of the largest size."""
    count = POSTED_MESSAGES_MAX
    overhead = len(b'{"value":""},') * count + 1
    values = ["v" * ((CONTROL_BYTES_MAX - overhead) // count)] * count
    many = json.dumps([{"value": value} for value in values], separators=(",", ":")).encode()
    assert CONTROL_BYTES_MAX - count < len(many) <= CONTROL_BYTES_MAX
    for body, params in ((many, JSON), (b"v" * MESSAGE_BYTES_MAX, {})):
        messages = posted_messages(body, params)
        batch = encode_batch(
            partition_id=1,
            sent_at_ns=[0] * len(messages),
            keys=[message.key for message in messages],
            values=[message.value for message in messages],
            producer_id=0,
            producer_epoch=0,
            sequence=0,
        )
        assert len(batch) <= BATCH_BYTES_MAX


MESSAGES = [PostedMessage(b"k", b"v", b"")]


def test_idempotency_key_gives_an_id_that_no_producer_draws():
    producer = keyed_producer("key", MESSAGES)
    assert KEYED_IDS <= producer.producer_id < 1 << 64
    assert 0 <= producer.producer_epoch < 1 << 32
    assert keyed_producer("key", MESSAGES) == producer
    assert keyed_producer("other", MESSAGES).producer_id != producer.producer_id


@pytest.mark.parametrize(
    "messages",
    [
        [PostedMessage(b"", b"kv", b"")],
        [PostedMessage(b"kv", b"", b"")],
        [PostedMessage(b"k", b"v", b"\x80")],
        [*MESSAGES, *MESSAGES],
    ],
)
def test_epoch_of_an_idempotency_key_differs_with_the_messages(messages):
    known, other = keyed_producer("key", MESSAGES), keyed_producer("key", messages)
    assert other.producer_id == known.producer_id
    assert other.producer_epoch != known.producer_epoch


@pytest.mark.parametrize("key", ["", "k" * 201, "ü", "a\tb", "\x7f"])
def test_idempotency_key_is_refused_unless_it_is_short_ascii(key):
    with pytest.raises(InvalidRequestError):
        keyed_producer(key, MESSAGES)
