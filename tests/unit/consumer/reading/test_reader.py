"""What a reader does without brokers: refusals of arguments, messages that were removed, partitions that are gone."""

from __future__ import annotations

import logging

import pytest

from keylane import (  # fmt: skip
    ConfigError,
    InvalidNameError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    Reader,
)
from keylane.consumer.reading.reader import _Place
from keylane.protocol.routing import PartitionState
from unit.consumer.reading.test_lineage_order import OPEN, past

META = "127.0.0.1:1"


def reader_at(offset: int, end: int | None) -> tuple[Reader, _Place]:
    reader: Reader = Reader(META, "s")
    entry = past(7, 0, 1024, state=OPEN)
    reader._lineage.learn([entry])
    place = reader._places[7] = _Place(entry.partition, offset, end)
    return reader, place


def test_reader_goes_on_behind_removed_messages(caplog):
    reader, place = reader_at(3, None)
    with caplog.at_level(logging.WARNING):
        reader._skip_removed(place, OffsetOutOfRangeError(first_offset=9))
    assert place.next_offset == reader.positions[7] == 9
    assert "6 messages were removed" in caplog.text
    with pytest.raises(OffsetOutOfRangeError):
        reader._skip_removed(place, OffsetOutOfRangeError(first_offset=9))


def test_partition_is_finished_when_all_that_was_wanted_is_removed():
    reader, place = reader_at(3, 9)
    reader._skip_removed(place, OffsetOutOfRangeError(first_offset=9))
    assert (reader._places, reader._lineage.left) == ({}, frozenset())


def test_partition_that_is_lost_is_left_out_with_a_warning(caplog):
    entry = past(7, 0, 1024, lost=True)
    with caplog.at_level(logging.WARNING):
        Reader(META, "s")._note_gone([entry])
    assert "partition 7 of s" in caplog.text
    with pytest.raises(PartitionUnknownError, match="are gone"):
        Reader(META, "s", partition=7)._note_gone([entry])


@pytest.mark.parametrize("gone", [{"lost": True}, {"state": PartitionState.EXPIRED}])
def test_following_reader_leaves_out_what_is_gone_meanwhile(gone, caplog):
    """The broker that had it does not answer any more, or does not know it."""
    reader, place = reader_at(3, None)
    with caplog.at_level(logging.WARNING):
        assert reader._look_anew([past(7, 0, 1024, **gone), past(9, 0, 1024)])
    assert (reader._places, reader._lineage.left) == ({}, frozenset())
    assert "from offset 3 on" in caplog.text
    reader, place = reader_at(3, None)
    assert not reader._look_anew([past(7, 0, 1024, state=OPEN)])
    assert reader._places == {7: place}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"subject": "not a name"}, InvalidNameError),
        ({"meta": "nowhere"}, ConfigError),
        ({"codec": 7}, ConfigError),
        ({"key": "text"}, ConfigError),
        ({"partition": "7"}, ConfigError),
        ({"where": 7}, ConfigError),
        ({"call_timeout_ms": 0}, ConfigError),
    ],
)
def test_reader_refuses_arguments_that_cannot_work(arguments, kind):
    with pytest.raises(kind):
        Reader(**({"meta": META, "subject": "s"} | arguments))
