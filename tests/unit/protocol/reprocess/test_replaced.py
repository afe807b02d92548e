"""Rows in the place of messages: which partitions have them, and where live reading begins behind a
backfill.
"""

from __future__ import annotations

import pytest

from keylane.protocol.errors import Reason
from keylane.protocol.reprocess.replaced import ends_behind_rows, replaced_by_rows
from support.raising import raises

CUT = {1: (), 2: (1,), 3: (1, 2)}
"""1 was cut: 2 has rows made of it, and 3 what was sent behind the cut."""
CUT_TWICE = {**CUT, 4: (3,), 5: (3, 4)}
MERGED = {1: (), 2: (), 3: (1, 2), 4: (3,), 5: (3, 4)}
"""1 and 2 were merged into 3 before the cut."""


@pytest.mark.parametrize(
    ("parents", "replaced"),
    [
        ({1: (), 2: (1,), 3: (1,), 4: (2, 3)}, {}),
        (CUT, {2: {1}}),
        (CUT_TWICE, {2: {1}, 4: {3}}),
        (MERGED, {4: {3}}),
        ({1: (), 9: (), 2: (1,), 8: (9,), 3: (1, 2, 9, 8)}, {2: {1}, 8: {9}}),
    ],
)
def test_partition_of_rows_is_known_by_the_lineage(parents, replaced):
    """Resizes and merges have none; a merge of the partitions behind a cut hides no rows."""
    assert replaced_by_rows(parents) == replaced


@pytest.mark.parametrize(
    ("parents", "ends", "cursors", "behind"),
    [
        (CUT, {1: 30, 2: 60, 3: None}, {1: 30}, {2: 60}),
        (CUT, {1: 30, 2: 0, 3: None}, {1: 30}, {2: 0}),
        (CUT, {1: 30, 2: 60, 3: None}, {1: 0}, {}),
        (CUT, {1: 0, 2: 0, 3: None}, {1: 0}, {2: 0}),
        (CUT, {1: 30, 2: 60, 3: None}, {2: 60, 3: 5}, {}),
        (CUT_TWICE, {1: 30, 2: 60, 3: 0, 4: 60, 5: None}, {1: 30}, {2: 60, 4: 60}),
        (CUT_TWICE, {1: 30, 2: 60, 3: 7, 4: 67, 5: None}, {2: 60, 3: 7}, {4: 67}),
        (MERGED, {1: 10, 2: 10, 3: 10, 4: 30, 5: None}, {3: 10}, {4: 30}),
        (MERGED, {1: 10, 2: 10, 3: 10, 4: 30, 5: None}, {1: 10, 2: 10, 3: 10}, {4: 30}),
    ],
)
def test_rows_of_what_a_backfill_has_are_passed(parents, ends, cursors, behind):
    """What the backfill continues lies before it; rows of rows count as what these were made of."""
    assert ends_behind_rows(replaced_by_rows(parents), parents, ends, cursors) == behind


@pytest.mark.parametrize(
    ("parents", "ends", "cursors", "says"),
    [
        (CUT, {1: 33, 2: 60, 3: None}, {1: 30}, r"messages \[30, 33\) of partition 1.*partition 2"),
        (
            CUT_TWICE,
            {1: 30, 2: 60, 3: 7, 4: 67, 5: None},
            {1: 30},
            r"messages \[0, 7\) of partition 3",
        ),
        (
            MERGED,
            {1: 10, 2: 12, 3: 0, 4: 22, 5: None},
            {1: 10, 2: 10},
            r"\[10, 12\) of partition 2",
        ),
        (CUT, {1: None, 2: 60, 3: None}, {1: 30}, r"\[30, None\) of partition 1"),
    ],
)
def test_rows_of_both_sides_are_refused(parents, ends, cursors, says):
    """No offset parts them, and the hint says what to do."""
    with raises(Reason.MANIFEST, match=says) as caught:
        ends_behind_rows(replaced_by_rows(parents), parents, ends, cursors)
    assert "into another folder" in caught.value.hint
