"""Bugs of readers and broadcast consumers whose subject is cut over, or deleted and created
anew.
"""

from __future__ import annotations

from typing import Any

from keylane.consumer.reading.lineage_order import LineageOrder, ReplacingRows
from keylane.consumer.reading.reader import Reader
from sim.mutants.mutant import Breaks, Patches


def rows_come_beside_their_messages(patches: Patches) -> None:
    """Rows are given although their messages came before."""
    patches.set(ReplacingRows, "is_source_read", lambda _self, _row, _had: False)


def rows_are_all_left_out(patches: Patches) -> None:
    """Rows are left out although their messages never came."""

    def is_source_read(self: Any, row: Any, _had: Any) -> bool:
        return bool(real(self, row, lambda _partition_id, _start, _end: True))

    real = patches.set(ReplacingRows, "is_source_read", is_source_read)


def rows_of_rows_come_again(patches: Patches) -> None:
    """Rows of rows are given although the messages behind them came before."""
    patches.set(ReplacingRows, "_are_sources_read", lambda _self, _partition_id, _had: False)


def later_subjects_of_the_name_are_read(patches: Patches) -> None:
    """A reader takes the partitions of a later subject of the name for those of its own."""
    patches.set(LineageOrder, "check_subject", lambda _self, _subject, _history: None)


def replaced_messages_count_as_read(patches: Patches) -> None:
    """A reader counts what it had not read of an expired partition as read."""

    def leave_out(self: Any, place: Any, past: Any) -> None:
        self._positions[int(past.partition.partition_id)] = past.end_offset or 1 << 40
        real(self, place, past)

    real = patches.set(Reader, "_skip_gone", leave_out)


BREAKS: tuple[Breaks, ...] = (
    rows_come_beside_their_messages,
    rows_are_all_left_out,
    rows_of_rows_come_again,
    later_subjects_of_the_name_are_read,
    replaced_messages_count_as_read,
)
