"""What the tests of killed brokers share: brokers that start fast, and a place where a kill loses nothing written."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.broker_forks import Forks


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    found = Forks()
    yield found
    found.close()


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """In memory where there is such a disk: a killed process loses nothing that it wrote, synced or not."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)
