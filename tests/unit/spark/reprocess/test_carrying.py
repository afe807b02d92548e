"""Where groups go on in the rows that take the place of messages: nothing is left out."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.errors import Reason
from keylane.protocol.reprocess.manifest import Manifest, SourceRange
from keylane.spark.reprocess.carrying import SourceOffsets, check_manifest_covers, positions
from keylane.spark.reprocess.messages import PROPERTIES
from support.raising import raises

SCHEMA = pa.schema([("partition", pa.int32()), ("offset", pa.int64()), ("properties", PROPERTIES)])
Row = tuple[int, int, int]
"""New partition, source partition, source offset; new offsets count up."""


def batches_of(rows: list[Row], size: int) -> list[pa.RecordBatch]:
    offsets: dict[int, int] = {}
    made = []
    for new, source, at in rows:
        offset = offsets[new] = offsets.get(new, -1) + 1
        properties = [("keylane.source", "of the user"), ("keylane.source", f"{source}/{at}")]
        made.append({"partition": new, "offset": offset, "properties": properties})
    return [
        pa.RecordBatch.from_pylist(made[start : start + size], SCHEMA)
        for start in range(0, len(made), size)
    ]


@settings(deadline=None)  # the first call of pyarrow loads pandas where it is installed
@given(
    st.lists(st.tuples(st.integers(8, 9), st.integers(1, 3), st.integers(0, 9)), max_size=30),
    st.dictionaries(st.integers(1, 3), st.integers(0, 10)),
    st.integers(1, 7),
)
def test_position_is_the_first_row_that_the_group_has_not_handled(rows, cursors, size):
    """A source partition without a cursor is handled, and gone."""
    ends = {new: sum(row[0] == new for row in rows) for new in (8, 9)}
    begins = positions({"g": cursors}, batches_of(rows, size), ends)["g"]
    for new in ends:
        mine = [row for row in rows if row[0] == new]
        left = [at >= cursors.get(source, 10) for _, source, at in mine]
        assert begins[new] == (left.index(True) if any(left) else len(mine))


def test_row_without_its_source_is_refused():
    row = {"partition": 8, "offset": 0, "properties": [("replay", "clean")]}
    for properties in (
        [("replay", "clean")],
        [("keylane.source", "3")],
        [("keylane.source", "a/b")],
    ):
        batch = pa.RecordBatch.from_pylist([row | {"properties": properties}], SCHEMA)
        with raises(Reason.CUT_OVER, match=r"keylane\.source"):
            positions({"g": {3: 0}}, [batch], {8: 1})


def test_messages_that_the_backfill_lacks_are_told():
    """Behind its end, in a partition that was opened later, and before its start if a group has not
    handled them.
    """
    manifest = Manifest(
        job="j",
        code="c",
        subject="s",
        planned_at_ms=0,
        ranges=(SourceRange(partition_id=3, start=10, end=20),),
        piece_rows=1,
    )

    def stored(first: int, end: int, partition_id: int = 3) -> list[SourceOffsets]:
        return [SourceOffsets(partition_id=partition_id, first=first, end=end)]

    check_manifest_covers(manifest, stored(0, 20), {"g": {3: 10}})
    check_manifest_covers(manifest, stored(10, 20), {"g": {3: 0}})
    with raises(Reason.CUT_OVER, match="has 2 messages from offset 20 on"):
        check_manifest_covers(manifest, stored(0, 22), {})
    with raises(Reason.CUT_OVER, match="partition 4 has 5 messages from offset 0 on"):
        check_manifest_covers(manifest, stored(0, 5, 4), {})
    with raises(Reason.CUT_OVER, match=r"'g' has not handled 3 messages of partition 3, \[7, 10\)"):
        check_manifest_covers(manifest, stored(2, 20), {"g": {3: 7}})
