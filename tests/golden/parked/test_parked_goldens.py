"""What is stored and said of parked messages does not change unnoticed; what was said before there
were any is read.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden.parked import make_parked_goldens as goldens
from keylane.broker.partition.parked import Parked
from keylane.broker.partition.records import CursorBody, ParkedBody, decode_body, encode_body
from keylane.protocol.parked import ParkChange, ParkState, decode_key_rows
from keylane.protocol.record import HEADER_BYTES, Header, read_record

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "parked_v1.json").read_text())


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
    assert (len(parked), parked.adopted_parents, parked.frozen) == (3, {3}, False)
    assert list(parked.get(b"N24211").rows()) == [(3, 1, 2), (7, 20, 22)]


def test_golden_image_tells_how_each_message_failed():
    parked = Parked.of_image(7, bytes.fromhex(GOLDEN["image"]))
    (told,) = parked.get(None).failure_marks(7, ((7, 8),))
    assert (told[3].since_ms, parked.failure(told[3])) == (1_800_000_000_456, goldens.FAILURE)
    retrying = Parked.of_image(7, bytes.fromhex(GOLDEN["image with a next try"]))
    assert retrying.get(2).retry_at_ms == 1_800_000_060_000


def test_golden_image_tells_which_owner_has_messages_of_a_parked_key_handled():
    parked = Parked.of_image(7, bytes.fromhex(GOLDEN["image with a token"]))
    assert parked.image().hex() == GOLDEN["image with a token"]
    known = parked.get(b"N14228")
    assert (known.state, known.owner_token, parked.get(None).owner_token) == (
        ParkState.PARKED,
        5,
        0,
    )


def test_golden_image_tells_which_parent_is_being_taken_over():
    parked = Parked.of_image(7, bytes.fromhex(GOLDEN["image while a parent is taken over"]))
    assert parked.image().hex() == GOLDEN["image while a parent is taken over"]
    assert (parked.partly_adopted_parents, parked.adopted_parents) == ({5}, {3})


def test_golden_image_tells_what_a_reset_keeps_for_children():
    name = "image behind a reset that children are left out of"
    parked = Parked.of_image(7, bytes.fromhex(GOLDEN[name]))
    assert parked.image().hex() == GOLDEN[name]
    assert (parked.offsets_for_children, parked.retaining_ancestors) == ({-1: 7, 512: 3}, {3})
    assert (parked.children_notify_ancestors, len(parked)) == (True, 0)


def test_golden_image_tells_which_sources_have_displaced_messages():
    parked = Parked.of_image(7, bytes.fromhex(GOLDEN["image with displaced messages"]))
    assert parked.image().hex() == GOLDEN["image with displaced messages"]
    assert parked.get(b"N24211").displaced_sources == {5}
    assert parked.get(b"N14228").displaced_sources == frozenset()


def test_golden_key_rows_read_back():
    assert decode_key_rows(bytes.fromhex(GOLDEN["key rows"])) == goldens.KEY_ROWS


def test_cursor_without_failed_tries_has_the_bytes_of_an_earlier_version():
    record = encode_body(7, CursorBody("audit", 5, 3, [(5, 6)]))
    assert record[HEADER_BYTES:] == b"\x94\xa5audit\x05\x03\x91\x92\x05\x06"


def test_body_of_parked_messages_is_an_array():
    assert encode_body(7, ParkedBody("g", 1, 2, ()))[HEADER_BYTES:] == b"\x94\xa1g\x01\x02\x90"
