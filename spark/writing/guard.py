"""Refuses to write the rows of a key out of order. Their offsets in the source partition must
increase. Pure.

The columns `partition` (or `queue`) and `offset` (or `logic_offset`), and `subject` if there are
several, identify where a row was read. Within a task, offsets must increase for each pair of source
partition and logical partition, which keeps each key in order. `keylane.spark.ordered` returns rows
in this order, one logical partition after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...protocol.errors import Reason, RowsError
from ...protocol.limits import LOGICAL_PARTITIONS
from .job import Order

PAIRS = (
    ("partition", "offset"),
    ("queue", "logic_offset"),
    ("partition", "logic_offset"),
    ("queue", "offset"),
)
_NO_KEY = LOGICAL_PARTITIONS
"""Stands in for the logical partition of rows without a key."""


def guarded_columns(
    names: Sequence[str], order: Order, *, key_was_read: bool = False
) -> tuple[str, str] | None:
    """
    Return the columns to check, or None if there is no order to check.

    Args:
        names: the columns of the rows.
        order: the write option `order`.
        key_was_read: True if the column `key` was read from a subject, and its rows are therefore
            ordered.

    Raises:
        RowsError: the columns to check are missing.
    """
    if order == "none":
        return None
    for pair in PAIRS:
        if set(pair) <= set(names):
            return pair
    if order == "required" or {name for pair in PAIRS for name in pair} & set(names):
        raise RowsError(
            Reason.ROW_ORDER,
            f"the columns partition and offset are needed, and there are {', '.join(names)}",
        )
    if key_was_read:
        raise RowsError(
            Reason.ROW_ORDER,
            "the column key was read from a subject, but the columns partition and offset, which "
            "show that the order of each key is kept, were dropped: keep them, or set order=none "
            "if the rows of a key have no order",
        )
    return None


class OrderGuard:
    """Checks that the rows of one task are in order."""

    def __init__(self, columns: tuple[str, str], *, task: int) -> None:
        self._partition, self._offset = columns
        self._task = task
        self._latest_offsets: dict[str, npt.NDArray[np.int64]] = {}
        """The last offset of each logical partition by source partition, or -1 if there is none."""

    @property
    def sources(self) -> dict[str, int]:
        """The logical partitions that have rows, as a bit set for each source partition; see
        TaskReport.
        """
        return {
            source: int.from_bytes(
                np.packbits(latest_offsets[:_NO_KEY] >= 0, bitorder="little"), "little"
            )
            for source, latest_offsets in self._latest_offsets.items()
        }

    def check(
        self,
        batch: pa.RecordBatch,
        logical_partitions: npt.NDArray[np.uint16],
        keyed: npt.NDArray[np.bool_],
        first_row: int,
    ) -> None:
        """
        Check the next rows.

        Args:
            logical_partitions: the logical partition of each row.
            keyed: True for each row with a key; other rows have no order.
            first_row: the number of the first row, for errors.

        Raises:
            RowsError: an offset does not increase.
        """
        if not batch.num_rows:
            return
        names = batch.schema.names
        offsets = self._integers(batch, self._offset)
        partitions = self._integers(batch, self._partition)
        logical_partitions = np.where(keyed, logical_partitions, np.uint16(_NO_KEY))
        subjects = batch.column("subject").to_pylist() if "subject" in names else None
        if subjects is not None and len(set(subjects)) > 1:
            for subject in dict.fromkeys(subjects):
                rows = np.flatnonzero(np.array([each == subject for each in subjects]))
                self._check_source(
                    f"{subject}/",
                    partitions[rows],
                    offsets[rows],
                    logical_partitions[rows],
                    rows + first_row,
                )
            return
        prefix = "" if subjects is None else f"{subjects[0]}/"
        self._check_source(
            prefix,
            partitions,
            offsets,
            logical_partitions,
            np.arange(first_row, first_row + len(partitions)),
        )

    def _check_source(
        self, prefix: str, partitions: Any, offsets: Any, logical_partitions: Any, row_numbers: Any
    ) -> None:
        # The sort is stable: it keeps the order within groups.
        order = np.lexsort((logical_partitions, partitions))
        partitions, offsets, logical_partitions, row_numbers = (
            partitions[order],
            offsets[order],
            logical_partitions[order],
            row_numbers[order],
        )
        is_next = (np.diff(partitions) == 0) & (np.diff(logical_partitions) == 0)
        descents = np.flatnonzero((np.diff(offsets) <= 0) & is_next)
        if len(descents):
            index = int(descents[0]) + 1
            raise self._order_error(
                f"{prefix}{partitions[index]}",
                int(row_numbers[index]),
                int(offsets[index]),
                int(offsets[index - 1]),
            )
        edges = np.flatnonzero(np.concatenate(([True], ~is_next, [True])))
        firsts, lasts = edges[:-1], edges[1:] - 1
        sources, starts = np.unique(partitions[firsts], return_index=True)
        ends = [*starts[1:].tolist(), len(firsts)]
        for part, start, end in zip(sources.tolist(), starts.tolist(), ends, strict=True):
            groups = slice(start, end)
            self._check_follows_earlier_rows(
                f"{prefix}{part}",
                firsts[groups],
                lasts[groups],
                offsets,
                logical_partitions,
                row_numbers,
            )

    def _check_follows_earlier_rows(
        self,
        source: str,
        firsts: Any,
        lasts: Any,
        offsets: Any,
        logical_partitions: Any,
        row_numbers: Any,
    ) -> None:
        """
        Check that each group of rows begins after the earlier rows of its logical partition.

        Args:
            source: the source partition of all groups.
            firsts, lasts: the indexes of the first and last row of each group.
            offsets, logical_partitions: the offset and the logical partition of each row.
            row_numbers: the number of each row, for errors.
        """
        latest_offsets = self._latest_offsets.get(source)
        if latest_offsets is None:
            latest_offsets = self._latest_offsets[source] = np.full(_NO_KEY + 1, -1, np.int64)
        previous = latest_offsets[logical_partitions[firsts]]
        descents = np.flatnonzero(offsets[firsts] <= previous)
        if len(descents):
            index = int(firsts[descents[0]])
            raise self._order_error(
                source, int(row_numbers[index]), int(offsets[index]), int(previous[descents[0]])
            )
        latest_offsets[logical_partitions[firsts]] = offsets[lasts]

    def _integers(self, batch: pa.RecordBatch, name: str) -> Any:
        column = batch.column(name)
        if column.null_count or not pa.types.is_integer(column.type):
            raise RowsError(
                Reason.ROW_ORDER, f"column {name} has values that are not whole numbers"
            )
        return column.to_numpy(zero_copy_only=False).astype(np.int64)

    def _order_error(self, source: str, row: int, offset: int, previous: int) -> RowsError:
        return RowsError(
            Reason.ROW_ORDER,
            f"row {row} of task {self._task} has offset {offset} of {self._partition} {source}, "
            f"after offset {previous}",
            task=self._task,
            row=row,
            offset=offset,
        )
