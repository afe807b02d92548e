"""Runs the tasks of a job as Spark does, in threads of this process: for tests of jobs that need no
JVM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import pyarrow as pa

TaskFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class TasksHere:
    """What a job needs of a Spark session: tasks by number, all at once."""

    def __init__(self) -> None:
        self._count = 0
        self._function: TaskFunction | None = None

    def range(self, _start: int, end: int, _step: int, _tasks: int) -> Self:
        self._count = end
        return self

    def mapInArrow(self, function: TaskFunction, _schema: str) -> Self:
        self._function = function
        return self

    def collect(self) -> list[pa.RecordBatch]:
        def run(number: int) -> list[pa.RecordBatch]:
            assert self._function is not None
            return list(self._function(iter([pa.RecordBatch.from_pydict({"id": [number]})])))

        with ThreadPoolExecutor(max(1, self._count)) as pool:
            return [batch for batches in pool.map(run, range(self._count)) for batch in batches]
