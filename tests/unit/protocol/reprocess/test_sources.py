"""What a row says that it was made of."""

from __future__ import annotations

import pytest

from keylane.protocol.message import Message, pack_properties
from keylane.protocol.reprocess.manifest import SOURCE, parse_source


@pytest.mark.parametrize(
    ("text", "source"),
    [("3/17", (3, 17)), ("3", None), ("a/b", None), ("3/-1", None), ("٣/1", None), (b"3/1", None)],
)
def test_row_says_its_source_when_the_property_is_a_place(text, source):
    assert (
        parse_source(
            Message(
                "s",
                b"k",
                b"v",
                0,
                1,
                0,
                packed_properties=pack_properties({SOURCE: text}, kept=[SOURCE]),
            )
        )
        == source
    )


def test_row_says_no_source_when_it_has_no_such_property():
    assert parse_source(Message("s", b"k", b"v", 0, 1, 0, packed_properties=b"")) is None
    assert parse_source(Message("s", b"k", b"v", 0, 1, 0, packed_properties=b"\xc1")) is None
