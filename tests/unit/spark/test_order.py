"""ordered(): what it asks of a frame, without a JVM; tests/spark has it in a session."""

from __future__ import annotations

import pytest

from keylane.protocol.errors import ConfigError
from keylane.spark import ordered


class Frame:
    """A frame that notes what is done to it."""

    def __init__(self, *columns: str) -> None:
        self.columns = list(columns)
        self.done: list[tuple[object, ...]] = []

    def repartition(self, *by: object) -> Frame:
        self.done.append(by)
        return self

    def sortWithinPartitions(self, *by: str) -> Frame:
        self.done.append(by)
        return self


def test_rows_are_spread_by_logical_partition_and_sorted():
    frame = Frame("value", "offset", "epoch", "logical_partition")
    assert ordered(frame, 8) is frame  # type: ignore[arg-type, comparison-overlap]
    assert frame.done == [
        (8, "logical_partition"),
        ("logical_partition", "epoch", "offset"),
    ]


@pytest.mark.parametrize("places", [("partition",), ("queue",), ("partition", "queue")])
def test_rows_with_one_place_are_sorted_by_partition_or_queue_when_it_is_there(places):
    """Rows without a key: a repeated task of a write has to give the same order."""
    frame = Frame("value", "offset", "epoch", "logical_partition", *places)
    ordered(frame, 8)  # type: ignore[arg-type]
    assert frame.done[-1] == ("logical_partition", "epoch", "offset", *places)


def test_subjects_are_kept_apart_and_spark_chooses_how_many_tasks():
    frame = Frame("subject", "offset", "epoch", "logical_partition")
    ordered(frame)  # type: ignore[arg-type]
    assert frame.done == [
        ("subject", "logical_partition"),
        ("subject", "logical_partition", "epoch", "offset"),
    ]


def test_missing_columns_are_told_with_the_option():
    with pytest.raises(
        ConfigError, match=r"needs the columns logical_partition, epoch: .* `columns`"
    ):
        ordered(Frame("offset", "value"))  # type: ignore[arg-type]


@pytest.mark.parametrize("tasks", [0, -1, "4", True])
def test_number_of_tasks_is_checked(tasks):
    with pytest.raises(ConfigError, match="tasks is a whole number"):
        ordered(Frame("logical_partition", "epoch", "offset"), tasks)  # type: ignore[arg-type]
