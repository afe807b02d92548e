"""`keylane broker index rebuild` and `switch`, killed at every point of their work: the broker
starts after it.

Each is killed at each point when it passes it for the first time, the second time, and so on until
it comes to its end. Then a real broker is started in the folder, with either index, and has
everything that was acked before.

`make test` kills one work of each command, at the first two passages of a point and at every
eighth; `make kills` kills all four at every passage.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import closing

import pytest

from keylane.broker.offline.index_work import verify_indexes
from keylane.broker.storage.fail_points import POINTS
from keylane.broker.storage.files import RealFiles
from support.brokers.killed_broker import KILLED, Run

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]

OTHER = {"file": "rocksdb", "rocksdb": "file"}
IN_FILES = {
    "create",
    "created",
    "write",
    "write~",
    "written",
    "sync",
    "synced",
    "rename",
    "renamed",
    "remove",
    "removed",
    "sync-folder",
    "folder-synced",
    "make-folder",
    "folder-made",
}
IN_LIBRARY = {
    "index-write",
    "index-written",
    "index-sync",
    "index-synced",
    "index-flush",
    "index-flushed",
    "index-clear",
    "index-cleared",
}
PASSED = {
    "rebuild-file": IN_FILES,
    "rebuild-rocksdb": IN_FILES | IN_LIBRARY,
    "switch-file": IN_FILES | {"index-flush", "index-flushed"},
    "switch-rocksdb": IN_FILES | IN_LIBRARY,
}
"""Work, and the points that it has to pass."""
IN_SAMPLE = ("rebuild-rocksdb", "switch-file")
"""What `make test` runs: between them they pass every point, of files and of the library, in both
directions.
"""
WORKS = [
    pytest.param(work, marks=[] if work in IN_SAMPLE else [pytest.mark.whole]) for work in PASSED
]


@pytest.fixture(scope="module")
def filled(forks, disk) -> dict[str, Run]:
    """A folder with some segments, for each index."""
    runs = {kind: Run(forks, disk / kind, kind=kind) for kind in OTHER}
    for run in runs.values():
        assert asyncio.run(run.live(whole=True)) == 0
    return runs


def check(run: Run) -> None:
    """A broker starts, has every message, and leaves a correct index."""
    assert asyncio.run(run.live(whole=True)) == 0
    with closing(RealFiles(run.data)) as files:
        reports = verify_indexes(files)
    for report in reports:
        left = report.index != run.kind
        assert left or report.problems == [], report


@pytest.mark.parametrize("work", WORKS)
def test_broker_starts_after_work_on_an_index_was_killed(work, forks, filled, folder, is_killed):
    """Killed at any point, the work leaves a folder in which a broker has every acked message,
    under either index.
    """
    command, to = work.split("-")
    before = filled[to if command == "rebuild" else OTHER[to]]
    passed = set()
    for point in POINTS:
        for count in filter(is_killed, range(1, 100)):
            run = before.copy(folder / "life", batches=2, kind=to if count % 2 else before.kind)
            ended = forks.work(command, run.data, to, KEYLANE_FAIL_AT=f"{point}:{count}")
            assert ended in {0, KILLED}
            if ended == KILLED and count % 3 == 2:  # mended by hand before the broker starts
                assert forks.work("rebuild", run.data, to) == 0
            if ended == KILLED or not passed:
                check(run)
            shutil.rmtree(run.root)
            if ended == 0:
                break
            passed.add(point)
    assert passed == PASSED[work]
