"""What the tests of killed brokers share: brokers that start fast, and a disk on which a kill loses
nothing written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.brokers.broker_forks import Forks
from support.brokers.spare import Spare
from support.cluster import Cluster

FIRST_PASSAGES, EVERY_PASSAGE = 2, 8


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def spare(cluster: Cluster, tmp_path: Path) -> Iterator[Spare]:
    """A follower of the cluster's broker group g1, not yet started."""
    spare = Spare(cluster, tmp_path / "spare")
    yield spare
    spare.kill()


@pytest.fixture(scope="session")
def is_killed(request: pytest.FixtureRequest) -> Callable[[int], bool]:
    """True of a passage of a point, from 1 on, at which it is killed: of all with --whole, else the
    first two, and every eighth.
    """
    whole = bool(request.config.getoption("--whole"))
    return lambda passage: whole or passage <= FIRST_PASSAGES or passage % EVERY_PASSAGE == 0


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """In memory where the machine has such a disk: a killed process loses nothing that it wrote,
    synced or not.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def folder(disk: Path) -> Iterator[Path]:
    """A folder of the test's own on the disk, so that a test that failed leaves nothing in the way
    of the next.
    """
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        yield Path(folder)
