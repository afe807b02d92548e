"""Changes and views of parked messages cross the wire, and texts of failures keep their limits."""

from __future__ import annotations

import msgspec
import pytest

from keylane.protocol.errors import HandlerTimeoutError
from keylane.protocol.parked.changes import (
    FAILURE_KIND_CHARS_MAX,
    FAILURE_TEXT_CHARS_MAX,
    AdoptedKey,
    Failure,
    Free,
    Park,
    ParkState,
    Redrive,
    Unpark,
    decode_adopted,
    decode_changes,
    encode_parked,
    failure_of,
)
from keylane.protocol.parked.views import ParkedKeyRow, decode_key_rows

FAILURE = Failure("ValueError", "no", "c", 5, 3)


def test_changes_read_back():
    changes = [
        Park(None, ((1, 2),), FAILURE),
        Park(b"", ()),
        Unpark(b"k", 3, ((0, 1),)),
        Free(b"k"),
    ]
    assert decode_changes(encode_parked(changes)) == changes


def test_rows_read_back():
    keys = [AdoptedKey(b"k", ParkState.REDRIVING, 1, None, ((3, 4, 5),))]
    rows = [ParkedKeyRow(None, ParkState.PARKED, 2)]
    assert decode_adopted(encode_parked(keys)) == keys
    assert decode_key_rows(encode_parked(rows)) == rows


@pytest.mark.parametrize("data", [b"", b"\x91\x92\x63\x00", b"\xc1", encode_parked({"a": 1})])
def test_bytes_that_are_no_changes_are_refused(data: bytes):
    with pytest.raises(msgspec.MsgspecError):
        decode_changes(data)


def test_failure_with_a_text_over_the_limit_is_refused():
    long = Failure("E", "x" * (FAILURE_TEXT_CHARS_MAX + 1), "c", 5, 3)
    with pytest.raises(msgspec.ValidationError):
        decode_changes(encode_parked([Park(b"k", (), long)]))


def test_failure_of_an_error_of_keylane_has_its_message_without_the_advice():
    """A log line and a table had the name of the error twice, and the advice behind an escaped line
    end.
    """
    failure = failure_of(HandlerTimeoutError("the handler is slow"), client="", at_ms=7, attempts=1)
    assert (failure.kind, failure.text) == ("HandlerTimeoutError", "the handler is slow")


def test_failure_of_an_error_keeps_the_limits():
    error = type("E" * 500, (Exception,), {})("\ud800" + "x" * 5_000)
    failure = failure_of(error, client="c" * 500, at_ms=7, attempts=3)
    assert len(failure.kind) == len(failure.client) == FAILURE_KIND_CHARS_MAX
    assert len(failure.text) == FAILURE_TEXT_CHARS_MAX
    assert (failure.text[0], failure.at_ms, failure.attempts) == ("?", 7, 3)
    changes = [Park(b"k", ((0, 1),), failure), Redrive(b"k")]
    assert decode_changes(encode_parked(changes)) == changes
