"""The offset of a stream: its form is fixed, and what is not one is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from keylane.protocol.errors import CheckpointMismatchError
from keylane.spark.streaming.offset import (
    StreamOffset,
    check_keys,
    check_subjects,
    describe_keys,
    from_json,
    to_json,
)

ORIGIN = StreamOffset(subjects={"flights": 7, "airports": 0}, offsets={3: 100, 12: 4})
OFFSET = StreamOffset(
    subjects={"flights": 7, "airports": 0}, offsets={12: 80, 3: 120}, waiting={9: 5}
)
GOLDEN = {
    '{"keylane": 1, "subjects": {"airports": 0, "flights": 7}, "offsets": {"3": 120, "12": 80}, '
    '"waiting": {"9": 5}}': (OFFSET),
    '{"keylane": 1, "subjects": {"airports": 0, "flights": 7}, "offsets": {"3": 100, "12": 4}, '
    '"initial": true}': (replace(ORIGIN, initial=True)),
    '{"keylane": 1, "subjects": {"airports": 0, "flights": 7}, "offsets": {"3": 120, "12": 80}, '
    '"waiting": {"9": 5}, '
    '"origin": {"offsets": {"3": 100, "12": 4}}}': replace(OFFSET, origin=ORIGIN),
    '{"keylane": 2, "subjects": {"airports": 0, "flights": 7}, "keys": "", "offsets": '
    '{"3": 100, "12": 4}}': (replace(ORIGIN, keys="")),
    '{"keylane": 2, "subjects": {"airports": 0, "flights": 7}, "keys": "2 keys, digest '
    '178968c0798615fd", '
    '"offsets": {"3": 100, "12": 4}}': replace(ORIGIN, keys=describe_keys({b"k1", b"k2"})),
}
"""These texts are in checkpoints: a version that writes or reads others needs another number in
`keylane`.
"""


@pytest.mark.parametrize("text", GOLDEN)
def test_offset_is_the_golden_text_in_both_directions(text):
    """An offset has one text, whatever the order of its maps, and the text is read as that
    offset.
    """
    assert json.dumps(to_json(GOLDEN[text])) == text
    assert from_json(json.loads(text)) == GOLDEN[text]


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({}, "not one of keylane's streams"),
        (None, "not one of keylane's streams"),
        ({"flights": {"0": 23}}, "not one of keylane's streams"),
        ({"keylane": 3, "subjects": {}, "offsets": {}}, "offsets of version 3"),
        ({"keylane": 1, "offsets": {}}, "damaged"),
        ({"keylane": 1, "subjects": {"a": 1}, "offsets": {"3": "4"}}, "damaged"),
        ({"keylane": 1, "subjects": {"a": 1}, "offsets": {"x": 4}}, "damaged"),
        ({"keylane": 1, "subjects": {"a": 1}, "offsets": {"3": -4}}, "damaged"),
        ({"keylane": 1, "subjects": {"a": 1}, "offsets": {}, "more": 1}, "damaged"),
    ],
    ids=str,
)
def test_offset_of_another_source_is_refused(form, says):
    """The error says what is wrong with the checkpoint."""
    with pytest.raises(CheckpointMismatchError, match=re.escape(says)):
        from_json(form)


@pytest.mark.parametrize(
    ("subjects", "says"),
    [
        ({"flights": 7}, "is of airports, flights, and the stream reads flights"),
        ({"flights": 8, "airports": 3}, "earlier subject flights"),
    ],
    ids=str,
)
def test_offset_of_other_subjects_is_refused(subjects, says):
    """A subject that was deleted and made anew is another one."""
    with pytest.raises(CheckpointMismatchError, match=says):
        check_subjects(OFFSET, subjects)


def test_offset_is_of_its_subjects_where_an_id_is_not_known():
    """An old metaserver says no ids."""
    check_subjects(OFFSET, {"flights": 7, "airports": 3})
    check_subjects(OFFSET, {"flights": 0, "airports": 0})


@pytest.mark.parametrize(
    ("before", "now"),
    [({b"k1", b"k2"}, None), (None, {b"k1"}), ({b"k1"}, {b"k2"}), ({b"a", b"b"}, {b"ab"})],
)
def test_offset_of_other_keys_is_refused(before, now):
    """It counts messages of every key as read: those of the others would be left out for ever."""
    with pytest.raises(CheckpointMismatchError, match=r"the checkpoint is of .+ stream reads"):
        check_keys(replace(OFFSET, keys=describe_keys(before)), describe_keys(now))
    check_keys(replace(OFFSET, keys=describe_keys(before)), describe_keys(before))
    check_keys(OFFSET, describe_keys(now))  # an earlier version has not written them
