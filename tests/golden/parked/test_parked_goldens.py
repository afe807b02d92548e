"""What is stored and said of parked messages does not change unnoticed; what was said before there were any is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden.make_protocol_goldens import PAYLOAD
from golden.parked import make_parked_goldens as goldens
from keylane.broker.partition.failure_runs import UNKNOWN
from keylane.broker.partition.parked import Parked
from keylane.broker.partition.records import CursorBody, ParkedBody, decode_body, encode_body
from keylane.protocol import frames
from keylane.protocol.parked import ParkChange, ParkState, decode_key_rows
from keylane.protocol.record import HEADER_BYTES, Header, read_record

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "parked_v1.json").read_text())
BEFORE_FAILURES = json.loads((HERE / "parked_v1_before_failures.json").read_text())
"""Of a version that keeps one failure for all messages without an order."""
EARLIER = json.loads((HERE / "frames_v1_before_parking.json").read_text())
"""Frames of a version that parks nothing."""


def test_parked_messages_have_their_golden_bytes():
    assert goldens.golden_bytes() == GOLDEN


@pytest.mark.parametrize("name", goldens.BODIES)
def test_golden_record_reads_back(name: str):
    record = bytes.fromhex(GOLDEN[name])
    header = read_record(record)
    assert isinstance(header, Header)
    assert decode_body(header, memoryview(record)[HEADER_BYTES:]) == goldens.BODIES[name]


def test_every_change_is_pinned():
    assert {type(change) for change in goldens.CHANGES} == set(ParkChange.__args__)


def test_golden_image_reads_back():
    parked = Parked.of_image(7, bytes.fromhex(GOLDEN["image"]))
    assert parked.image().hex() == GOLDEN["image"]
    assert (len(parked), parked.adopted, parked.frozen) == (3, {3}, False)
    assert list(parked.get(b"N24211").rows()) == [(3, 1, 2), (7, 20, 22)]


def test_golden_image_tells_how_each_message_failed():
    parked = Parked.of_image(7, bytes.fromhex(GOLDEN["image"]))
    (told,) = parked.get(None).marks(7, ((7, 8),))
    assert (told[3].since_ms, parked.failure(told[3])) == (1_800_000_000_456, goldens.FAILURE)
    retrying = Parked.of_image(7, bytes.fromhex(GOLDEN["image with a next try"]))
    assert retrying.get(2).next_ms == 1_800_000_060_000


def test_golden_image_tells_which_owner_has_messages_of_a_parked_key_handled():
    parked = Parked.of_image(7, bytes.fromhex(GOLDEN["image with a token"]))
    assert parked.image().hex() == GOLDEN["image with a token"]
    known = parked.get(b"N14228")
    assert (known.state, known.token, parked.get(None).token) == (ParkState.PARKED, 5, 0)


def test_golden_image_tells_which_parent_is_being_taken_over():
    parked = Parked.of_image(7, bytes.fromhex(GOLDEN["image while a parent is taken over"]))
    assert parked.image().hex() == GOLDEN["image while a parent is taken over"]
    assert (parked.taking, parked.adopted) == ({5}, {3})


def test_golden_image_tells_what_a_reset_keeps_for_children():
    name = "image behind a reset that children are left out of"
    parked = Parked.of_image(7, bytes.fromhex(GOLDEN[name]))
    assert parked.image().hex() == GOLDEN[name]
    assert (parked.passed, parked.sources) == ({-1: 7, 512: 3}, {3})
    assert (parked.children_tell, len(parked)) == (True, 0)


@pytest.mark.parametrize("name", ["image", "image with an edit"])
def test_image_of_a_version_without_failures_is_read(name: str):
    """All that it said is there; how each message failed is not known."""
    parked = Parked.of_image(7, bytes.fromhex(BEFORE_FAILURES[name]))
    assert parked.image().hex() == BEFORE_FAILURES[name]
    assert parked.get(None).failure == goldens.FAILURE
    assert [mark for *_, mark in parked.get(None).marked_from((0, 0), 9)] == [UNKNOWN]
    parked.apply(goldens.Park(None, ((20, 21),), goldens.FAILURE), at_ms=5)
    told = [(start, mark.since_ms) for _, start, _, mark in parked.get(None).marked_from((0, 0), 9)]
    assert told == [(7, 0), (20, 5)]


def test_records_of_a_version_without_failures_are_read():
    record = bytes.fromhex(BEFORE_FAILURES["parked"])
    header = read_record(record)
    assert isinstance(header, Header)
    body = decode_body(header, memoryview(record)[HEADER_BYTES:])
    assert body == ParkedBody("audit", 5, 1_800_000_000_456, goldens.CHANGES[:15])


def test_golden_key_rows_read_back():
    assert decode_key_rows(bytes.fromhex(GOLDEN["key rows"])) == goldens.KEY_ROWS


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("Ack", frames.Ack(7, "audit", "0123456789abcdef", 5, ((0, 3), (5, 2**40)))),
        ("Acquired", frames.Acquired(3, ((5, 9),), 12, False)),
        ("Batches", frames.Batches(0, 12, 9, True)),
        ("Acked", frames.Acked(2**40)),
    ],
)
def test_frame_of_a_version_that_parks_nothing_is_read(
    name: str, header: frames.Request | frames.Answer
):
    data = bytes.fromhex(EARLIER[name])
    decode = frames.decode_request if name == "Ack" else frames.decode_answer
    number, read, payload = decode(data)
    assert (number, read, payload) == (number, header, PAYLOAD)


def test_cursor_without_failed_tries_has_the_bytes_of_an_earlier_version():
    record = encode_body(7, CursorBody("audit", 5, 3, [(5, 6)]))
    assert record[HEADER_BYTES:] == b"\x94\xa5audit\x05\x03\x91\x92\x05\x06"


def test_body_of_parked_messages_is_an_array():
    assert encode_body(7, ParkedBody("g", 1, 2, ()))[HEADER_BYTES:] == b"\x94\xa1g\x01\x02\x90"
