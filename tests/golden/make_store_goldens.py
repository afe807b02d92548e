"""Writes store_v1.json: the files a broker leaves on its disk, in hex. Run it after a decision to
change a format.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

from keylane.broker.storage.data_folder import FIRST_MAX, begin_opening, claim_folder, record_heard
from keylane.protocol.batch import encode_batch
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, facts, open_store

PATH = Path(__file__).parent / "store_v1.json"
LENGTH = 32
"""Bytes of hex in a line."""


def store_files() -> dict[str, bytes]:
    """Path → content, after some calls of every kind."""
    disk, clock = SimDisk(), ManualClock()
    claim_folder(disk, broker_group="g1", rng=random.Random(1))
    rng = random.Random(2)
    for _ in range(FIRST_MAX):
        record_heard(disk, begin_opening(disk, rng=rng))
    begin_opening(disk, rng=rng)

    async def fill() -> None:
        store = open_store(disk, clock=clock, segment_bytes=4096)
        desk = Desk(store, clock)
        _, durable = store.host(facts(9, parents=(3, 4), queue=2, range_end=512))
        await durable
        await desk.host()
        await desk.append(batch())
        await desk.acquire(5)
        await desk.ack(5, (1, 2))
        with_properties = encode_batch(
            partition_id=9,
            sent_at_ns=[1, 2],
            keys=[b"", "schlüssel".encode()],
            values=[b"", b"v" * 3300],
            properties=[b"", b"\x81\xa1a\xa1b"],
            producer_id=1 << 40,
            producer_epoch=3,
            sequence=0,
        )
        await desk.append(with_properties, 9)
        assert await store.snapshotter.write()
        clock.wall_offset_ms += 5
        await desk.append(batch(sequence=2, count=1))
        _, durable = store.seal(9)
        await durable
        await store.carry_over.remove_oldest_segment()
        await store.close()

    asyncio.run(fill())
    return {path: bytes(content.data) for path, content in sorted(disk.contents.items())}


def main() -> None:
    golden = {
        path: [data[at : at + LENGTH].hex() for at in range(0, len(data), LENGTH)]
        for path, data in store_files().items()
    }
    PATH.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
