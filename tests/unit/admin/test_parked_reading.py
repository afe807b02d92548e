"""Views of messages without an order, made of how each of them failed."""

from __future__ import annotations

import pytest

from keylane.admin.parked_reading import ParkedReader, ParkedRow, narrow_view, split_by_error
from keylane.admin.parked_views import ParkedKeyView
from keylane.protocol.errors import KeylaneError, OffsetOutOfRangeError
from keylane.protocol.frames import Batches
from keylane.protocol.parked import Failure, ParkState
from unit.consumer.reading.test_lineage_order import past

FIRST = Failure("TimeoutError", "the bank", "c", 7, 5)
LAST = Failure("TimeoutError", "the bank", "d", 9, 5)
OTHER = Failure("KeyError", "town", "c", 8, 3)
LETTERS = ParkedKeyView(
    partition_id=7,
    key=None,
    state=ParkState.PARKED,
    messages=9,
    since_ms=1,
    failure=OTHER,
    first_source=3,
    first_offset=0,
)
ROWS = [
    ParkedRow(3, 4, 6, 50, FIRST),
    ParkedRow(3, 8, 9, 40, OTHER, 90),
    ParkedRow(7, 0, 1, 60, LAST, 80),
]


def test_view_of_some_messages_has_their_last_failure():
    view = narrow_view(LETTERS, ROWS)
    assert (view.messages, view.failure, view.since_ms, view.next_ms) == (4, LAST, 40, 80)
    assert (view.first_source, view.first_offset) == (3, 4)


def test_view_of_each_error_has_its_messages():
    """The most first; those of which nothing is known are the last."""
    views = split_by_error(LETTERS, [*ROWS, ParkedRow(7, 5, 9)])
    assert [(view.messages, view.failure) for view in views] == [(3, LAST), (1, OTHER), (4, None)]


def test_messages_of_which_nothing_is_known_have_the_failure_of_their_partition():
    assert split_by_error(LETTERS, [ParkedRow(7, 0, 9)]) == [LETTERS]
    (some,) = split_by_error(LETTERS, [ParkedRow(7, 0, 4)])
    assert (some.messages, some.failure) == (4, None)


class OwnerOfAncestor:
    """A broker that answers each read alike."""

    def __init__(self, told: KeylaneError | Batches) -> None:
        self.told = told

    async def call(self, _request):
        if isinstance(self.told, KeylaneError):
            raise self.told
        return self.told, b""


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (OffsetOutOfRangeError(offset=5, first_offset=7, next_offset=9), "no longer stored"),
        (OffsetOutOfRangeError(offset=5, first_offset=0, next_offset=3), "older copy"),
        (Batches(0, 5, 5, False), "older copy"),
    ],
    ids=["removed", "a copy that ends before", "a copy that ends there"],
)
async def test_parked_message_is_called_gone_only_when_retention_has_removed_it(told, problem):
    served = {7: past(7, 0, 1024).partition}
    reader = ParkedReader("s", served, lambda _partition: OwnerOfAncestor(told))
    read = await reader.read(7, 5)
    assert read.message is None
    assert problem in read.problem
    assert "no longer stored" in (await reader.read(8, 5)).problem
