"""A real broker killed at every point of its work on the disk: nothing acked is lost, nothing is stored twice.

For each named point the broker is killed when it passes it for the first time, the second time, and so on until a
whole run no longer gets there.  After each kill it is started again, and the client sends again what was not acked,
under the same sequences.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable

import pytest

from keylane.broker.storage.fail_points import FILE_POINTS, POINTS
from support.killed_broker import KILLED, Run, aged

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]

LATER = {"truncate", "truncated", "remove", "removed"}
"""Passed in a folder that has seen something already."""
STOPS = 25
STOP_STEP_S = 0.004
PLACES = [("file", point) for point in FILE_POINTS] + [("rocksdb", point) for point in POINTS]


@pytest.fixture(scope="module")
def old(forks, room) -> dict[str, Run]:
    """A folder to go on with, for each index."""
    return {kind: aged(forks, room / f"aged-{kind}", kind) for kind in ("file", "rocksdb")}


def passages(point: str, begin: Callable[[], Run], *, retain: bool) -> int:
    """Kill it there each time that it gets there, and see that nothing is lost; how often it got there."""
    count = 0
    while True:
        run = begin()
        ended = asyncio.run(run.live(f"{point}:{count + 1}", retain=retain))
        if ended != 0:
            assert ended == KILLED
            assert asyncio.run(run.live(whole=True, retain=retain)) == 0
            if count % 4 == 3:  # and once more, after the clean stop
                assert asyncio.run(run.live(whole=True, retain=retain)) == 0
        shutil.rmtree(run.root)
        if ended == 0:
            return count
        count += 1


@pytest.mark.parametrize("point", [one for one in FILE_POINTS if one not in LATER])
def test_a_kill_at_every_passage_of(point, forks, room):
    """Killed at this point of its first life, however often passed before, it has lost nothing it had answered."""
    assert passages(point, lambda: Run(forks, room / "new", batches=4), retain=False)


@pytest.mark.parametrize(("kind", "point"), PLACES)
def test_a_kill_in_an_old_folder_at(kind, point, old, room):
    """Nor where a torn end is cut, segments and old snapshots go, and an index is made anew, under either index."""
    assert passages(point, lambda: old[kind].copy(room / "life", batches=2), retain=True)


@pytest.mark.parametrize("kind", ["file", "rocksdb"])
def test_an_old_folder_says_which_work_it_needs(kind, old, room):
    """Not killed, a life in the old folder removes segments, snapshots and the torn end."""
    before = old[kind]
    run = before.copy(room / "life", batches=4)
    assert not run.first_position()
    assert asyncio.run(run.live(whole=True, retain=True)) == 0
    assert run.first_position() > 4096
    assert not set(before.snapshots()[:2]) & set(run.snapshots())
    assert not list(run.data.glob("unfinished-*"))
    assert not any(b"torn" in one.read_bytes() for one in run.data.glob("log/*"))
    shutil.rmtree(run.root)


@pytest.mark.parametrize("kind", ["file", "rocksdb"])
def test_a_stop_in_an_old_folder_at_any_moment(kind, old, room):
    """Asked to end while it serves, and while segments go, it has lost nothing it had answered."""
    for moment in range(STOPS):
        run = old[kind].copy(room / "life", batches=4)
        assert asyncio.run(run.live(retain=True, stop_s=moment * STOP_STEP_S)) == 0
        for _ in range(2):
            assert asyncio.run(run.live(whole=True, retain=True)) == 0
        shutil.rmtree(run.root)


def test_killed_again_while_coming_up(forks, tmp_path):
    """A broker killed at every operation of its start, one start after the other, comes up in the end."""
    run = Run(forks, tmp_path / "data")
    assert asyncio.run(run.live("synced:5")) == KILLED
    for point in ("create", "created", "write", "write~", "written", "sync", "synced"):
        for count in (1, 2):
            asyncio.run(run.live(f"{point}:{count}"))
    assert asyncio.run(run.live(whole=True)) == 0


def test_a_point_that_is_none(forks, tmp_path):
    """A misspelt point refuses the start."""
    run = Run(forks, tmp_path / "data")
    for text in ("nowhere:1", "sync", "sync:0", "sync:x"):
        assert asyncio.run(run.live(text)) == 1
