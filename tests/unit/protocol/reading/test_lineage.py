"""Which partitions of a set another one continues."""

from __future__ import annotations

import pytest

from keylane.protocol.reading.bounds import nearest_ancestors

LINEAGE = {1: (), 2: (), 3: (1, 2), 4: (3,), 5: (3,), 6: (4, 5)}


@pytest.mark.parametrize(
    ("within", "expected"),
    [
        ({1, 2, 3, 4, 5, 6}, {3: {1, 2}, 4: {3}, 5: {3}, 6: {4, 5}}),
        ({1, 2, 6}, {3: {1, 2}, 4: {1, 2}, 5: {1, 2}, 6: {1, 2}}),
        ({1, 4}, {3: {1}, 4: {1}, 5: {1}, 6: {1, 4}}),
        (set(), {}),
    ],
)
def test_nearest_ancestors_are_past_partitions_that_are_not_of_the_set(within, expected):
    nearest = nearest_ancestors(LINEAGE, within)
    assert {number: set(above) for number, above in nearest.items() if above} == expected


def test_parent_that_is_not_known_has_no_ancestors():
    assert nearest_ancestors({7: (3, 6)}, {3}) == {7: {3}}
