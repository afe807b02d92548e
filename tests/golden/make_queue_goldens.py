"""Writes queue_store_v1.json: what a broker keeps of a static subject and of a reset, in hex. Run
it after a decision.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

from keylane.broker.storage.data_folder import claim_folder
from keylane.broker.store.group_changes import set_cursor
from keylane.protocol.progress import SetCursor
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, facts, open_store

PATH = Path(__file__).parent / "queue_store_v1.json"
LENGTH = 32
"""Bytes of hex in a line."""


def queue_files() -> dict[str, bytes]:
    """Path → content: a partition of a static subject, whose group was set back."""
    disk, clock = SimDisk(), ManualClock()
    claim_folder(disk, broker_group="g1", rng=random.Random(1))

    async def fill() -> None:
        store = open_store(disk, clock=clock)
        desk = Desk(store, clock)
        told = facts(1, parents=(7,), queue=3)
        _, durable = store.host(type(told)(subject="s", partition=told.partition, static=True))
        await durable
        await desk.append(batch(count=9))
        await desk.acquire(5)
        await desk.ack(5, (0, 8))
        ask = SetCursor(group="audit", token=6, cursor=2)
        await set_cursor(store, store.state.partition(1), ask)
        await store.close()

    asyncio.run(fill())
    return {path: bytes(content.data) for path, content in sorted(disk.contents.items())}


def main() -> None:
    golden = {
        path: [data[at : at + LENGTH].hex() for at in range(0, len(data), LENGTH)]
        for path, data in queue_files().items()
    }
    PATH.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
