"""A service with one partition, whose pull lock is acquired."""

from __future__ import annotations

import pytest

from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, open_store


@pytest.fixture
async def desk() -> Desk:
    clock = ManualClock()
    desk = Desk(open_store(SimDisk(), clock=clock), clock)
    await desk.host()
    await desk.acquire(1)
    return desk
