"""Which batches brokers leave out by tags: never one with a message of a wanted tag."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.broker.answering import tags as module
from keylane.broker.answering.tags import remove_unwanted_batches
from keylane.protocol.batch import batch_starts, encode_batch
from keylane.protocol.message import pack_properties
from keylane.protocol.record import Compression, stamp_record

NAMES = ["paid", "new", "prepaid", "оплачен"]
tag_lists = st.lists(st.sampled_from(NAMES), max_size=2, unique=True)


def stored(*batches: list[list[str]], compression: Compression = Compression.NONE) -> bytes:
    """Batches one behind the other; of each message its tags."""
    data, offset = b"", 0
    for messages in batches:
        record = bytearray(
            encode_batch(
                partition_id=1,
                sent_at_ns=[10**18] * len(messages),
                keys=[b"k"] * len(messages),
                values=[b"paid " * 40] * len(messages),
                properties=[pack_properties(None, tags) if tags else b"" for tags in messages],
                producer_id=7,
                producer_epoch=0,
                sequence=offset,
                compression=compression,
            )
        )
        stamp_record(record, base_offset=offset, position=0, appended_at_ms=0)
        data += record
        offset += len(messages)
    return data


def kept(data: bytes) -> set[int]:
    """The offsets that are in batches."""
    return {
        offset
        for _, header in batch_starts(data)
        for offset in range(header.base_offset, header.next_offset)
    }


@given(
    st.lists(st.lists(tag_lists, min_size=1, max_size=3), min_size=1, max_size=6),
    st.sets(st.sampled_from(NAMES), min_size=1, max_size=2),
    st.integers(0, 2),
)
def test_left_out_batches_have_no_wanted_message_whatever_is_stored(batches, wanted, offset):
    """What stays and what is left out are all offsets; a value with the tag's text is no tag."""
    data = stored(*batches)
    offset = min(offset, len(batches[0]) - 1)
    left, ranges = remove_unwanted_batches(data, offset, [tag.encode() for tag in wanted])
    out = {number for low, high in ranges for number in range(low, high)}
    flat = [tags for messages in batches for tags in messages]
    assert not any(wanted & set(flat[number]) for number in out)
    assert kept(left) | out | set(range(offset)) == set(range(len(flat)))
    assert not kept(left) & out
    if all(not tags for tags in flat):
        assert left == b""


def test_packed_batch_stays_when_it_has_no_such_tag():
    """The broker does not unpack it: the consumer tells."""
    data = stored([["new"]] * 3, compression=Compression.ZSTD)
    assert batch_starts(data)[0][1].compression is not Compression.NONE
    assert remove_unwanted_batches(data, 0, [b"paid"]) == (data, [])


def test_batches_stay_when_the_answer_has_many_ranges(monkeypatch: pytest.MonkeyPatch):
    """The header of the answer stays small; what touches the last range still goes."""
    monkeypatch.setattr(module, "RANGES_MAX", 1)
    data = stored([["new"]], [["paid"]], [["new"]])
    left, ranges = remove_unwanted_batches(data, 0, [b"paid"])
    assert (ranges, kept(left)) == ([(0, 1)], {1, 2})
