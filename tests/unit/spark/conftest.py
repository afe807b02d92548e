"""Shelves for the tests of the Spark reader."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.shelves import Shelves


@pytest.fixture
def shelves() -> Iterator[Shelves]:
    shelves = Shelves()
    shelves.start()
    yield shelves
    shelves.stop()
