"""A real broker killed at every point of its work on the disk: nothing acked is lost, nothing is
stored twice.

For each named point the broker is killed when it passes it for the first time, the second time, and
so on until a whole run no longer gets there. After each kill it is started again, and the client
sends again what was not acked, under the same sequences.

`make test` kills at every point in a new folder and at all points of RocksDB's library; in an old
folder it kills at every sixth point, and at each that only an old folder has, and stops at every
sixth moment with the file index, at every tenth with RocksDB. Of the passages of a point it takes
the first two, and every eighth. `make kills`, a part of `make proof`, leaves nothing out.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest

from keylane.broker.storage.fail_points import FILE_POINTS, LIBRARY_POINTS
from support.brokers.killed_broker import KILLED, Run, aged

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]

LATER = {"truncate", "truncated", "remove", "removed"}
"""Points that only a broker in an old folder passes."""
STOP_STEP_S = 0.004
EVERY = {"file": 6, "rocksdb": 10}
"""The shares of `make test` by index: most of the work is the same under either."""


def sampled(kind: str, number: int, *values: object):
    """A case; `make test` leaves it out but for every sixth or tenth number, by the index."""
    left_out = number % EVERY[kind]
    return pytest.param(kind, *values, marks=[pytest.mark.whole] if left_out else [])


PLACES = [
    sampled(kind, 0 if kind == "file" and point in LATER else number, point)
    for kind in ("file", "rocksdb")
    for number, point in enumerate(FILE_POINTS)
]
LIBRARY = [("rocksdb", point) for point in LIBRARY_POINTS]


@pytest.fixture(scope="module")
def old(forks, disk) -> dict[str, Run]:
    """A folder with a past, for each index."""
    return {kind: aged(forks, disk / f"aged-{kind}", kind) for kind in ("file", "rocksdb")}


def passages(
    point: str, begin: Callable[[], Run], is_killed: Callable[[int], bool], *, retain: bool
) -> int:
    """Kill the broker at passages of the point, and check that nothing is lost; returns how often
    it was killed.
    """
    kills = 0
    for passage in filter(is_killed, count(1)):
        run = begin()
        ended = asyncio.run(run.live(f"{point}:{passage}", retain=retain))
        if ended != 0:
            assert ended == KILLED
            assert asyncio.run(run.live(whole=True, retain=retain)) == 0
            kills += 1
            if kills % 4 == 0:  # and once more, after the clean stop
                assert asyncio.run(run.live(whole=True, retain=retain)) == 0
        shutil.rmtree(run.root)
        if ended == 0:
            break
    return kills


@pytest.mark.parametrize("point", [point for point in FILE_POINTS if point not in LATER])
def test_broker_loses_nothing_when_killed_in_a_new_folder(point, forks, folder, is_killed):
    """A broker killed at this point of its first life, at any passage of it, has lost nothing that
    it had acked.
    """
    assert passages(point, lambda: Run(forks, folder / "new", batches=4), is_killed, retain=False)


@pytest.mark.parametrize(("kind", "point"), PLACES + LIBRARY)
def test_broker_loses_nothing_when_killed_in_an_old_folder(kind, point, old, folder, is_killed):
    """The same in a folder where a torn end is cut, segments and snapshots are removed, and an
    index is rebuilt.
    """
    begin = partial(old[kind].copy, folder / "life", batches=2)
    assert passages(point, begin, is_killed, retain=True)


@pytest.mark.parametrize("kind", ["file", "rocksdb"])
def test_life_in_an_old_folder_removes_segments_snapshots_and_the_torn_end(kind, old, folder):
    """Not killed, a life in the old folder removes segments, snapshots and the torn end."""
    before = old[kind]
    run = before.copy(folder / "life", batches=4)
    assert not run.first_position()
    assert asyncio.run(run.live(whole=True, retain=True)) == 0
    assert run.first_position() > 4096
    assert not set(before.snapshots()[:2]) & set(run.snapshots())
    assert not list(run.data.glob("unfinished-*"))
    assert not any(b"torn" in path.read_bytes() for path in run.data.glob("log/*"))
    shutil.rmtree(run.root)


STOPS = [
    sampled(kind, number, number * STOP_STEP_S)
    for kind in ("file", "rocksdb")
    for number in range(25)
]


@pytest.mark.parametrize(("kind", "after_s"), STOPS)
def test_broker_loses_nothing_when_stopped_in_an_old_folder(kind, after_s, old, folder):
    """A broker asked to end while it serves and removes segments has lost nothing that it had
    acked.
    """
    run = old[kind].copy(folder / "life", batches=4)
    assert asyncio.run(run.live(retain=True, stop_s=after_s)) == 0
    for _ in range(2):
        assert asyncio.run(run.live(whole=True, retain=True)) == 0
    shutil.rmtree(run.root)


def test_broker_starts_after_kills_at_every_operation_of_its_starts(forks, tmp_path):
    """A broker killed at every operation of its start, one start after the other, serves in the
    end.
    """
    run = Run(forks, tmp_path / "data")
    assert asyncio.run(run.live("synced:5")) == KILLED
    for point in ("create", "created", "write", "write~", "written", "sync", "synced"):
        for passage in (1, 2):
            asyncio.run(run.live(f"{point}:{passage}"))
    assert asyncio.run(run.live(whole=True)) == 0


def test_broker_refuses_to_start_with_an_unknown_point(forks, tmp_path):
    """A misspelt point refuses the start."""
    run = Run(forks, tmp_path / "data")
    for text in ("nowhere:1", "sync", "sync:0", "sync:x"):
        assert asyncio.run(run.live(text)) == 1
