"""The journal of the file index: what a failed checkpoint leaves is never taken for a whole one."""

from __future__ import annotations

import pytest

from keylane.broker.storage.index.file import FileConsumeQueues
from keylane.broker.storage.index.interface import Unit
from keylane.protocol.errors import StorageError
from keylane.testing.machines.disk import SimDisk


def units(first: int, count: int) -> list[tuple[int, Unit]]:
    return [(1, Unit(n, 1, 100 * n, 100, n)) for n in range(first, first + count)]


def test_new_journal_that_did_not_fit():
    """A journal begun on a full disk is not added to by a later start: everything is found after
    every start.
    """
    disk = SimDisk()
    queues = FileConsumeQueues(disk)
    queues.dispatch(units(0, 300))
    queues.checkpoint(30_000)
    queues.dispatch(units(300, 10))
    disk.free_space = 10
    for _ in range(2):
        with pytest.raises(StorageError):
            queues.checkpoint(31_000)
    disk.free_space = None

    for first in (300, 310):
        queues = FileConsumeQueues(disk)
        assert queues.recover(100 * first) == 100 * first
        queues.dispatch(units(first, 10))
        queues.checkpoint(100 * (first + 10))
    restored = FileConsumeQueues(disk)
    assert restored.recover(32_000) == 32_000
    assert restored.bounds(1) == (0, 320)
    assert [unit.base_offset for unit in restored.find(1, 0, end=320, bytes_max=1 << 20)] == list(
        range(320)
    )
