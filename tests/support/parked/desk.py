"""A broker on a simulated disk that is asked about parked messages, in short words."""

from __future__ import annotations

from typing import Any

from keylane.broker.parking import Parking
from keylane.broker.partition.park_views import build_adoption_page
from keylane.broker.partition.parked import Parked
from keylane.broker.partition.partition import Group
from keylane.broker.store.parking import change_parked
from keylane.protocol.frames import (
    Acquire,
    AdoptParked,
    ChangeParked,
    EditParked,
    ListParked,
    ReadParked,
)
from keylane.protocol.parked import (
    AdoptedKey,
    ChangeParkedKey,
    Failure,
    ParkChange,
    ParkedKeyRow,
    ParkedList,
    ParkedOffsets,
    ParkKey,
    decode_adopted,
    decode_key_rows,
    encode_parked,
)
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import SESSION, Desk, batch, open_store

FAILURE = Failure("ValueError", "no such aircraft", "c", 5, 3)


class ParkedDesk(Desk):
    """The owner of partition 1 has token 1; 40 messages are stored."""

    def __init__(self, disk: SimDisk, **changes: Any) -> None:
        clock = ManualClock()
        super().__init__(open_store(disk, clock=clock, **changes), clock)
        self.disk = disk
        self.changes = changes
        self.parking = Parking(self.store, self.service, clock=clock, folder_ownership=None)

    async def fill(self, *, batches: int = 4, **facts: Any) -> ParkedDesk:
        await self.host(**facts)
        for number in range(batches):
            await self.append(batch(sequence=10 * number, count=10))
        await self.acquire(1)
        return self

    def again(self, *, snapshot: bool = True) -> ParkedDesk:
        """The broker of the same disk, started anew; without its snapshots from the log alone."""
        for name in [] if snapshot else self.disk.list("snapshot"):
            self.disk.remove(f"snapshot/{name}")
        return ParkedDesk(self.disk, **self.changes)

    @property
    def group(self) -> Group:
        return self.store.state.partition(1).groups["audit"]

    @property
    def parked(self) -> Parked:
        return self.group.get_or_create_parked(self.store.state.partition(1).facts.partition)

    def state(self) -> tuple[Any, ...]:
        """What counts of the group: fence, progress, failed tries, and what it has parked."""
        group = self.group
        keys: dict[ParkKey, tuple[Any, ...]] = {}
        following: int | None = 0
        while following is not None:
            page, following = build_adoption_page(
                self.parked, lambda _key: True, first_row=following
            )
            for key in page:
                rows = keys.get(key.key, (*(None,) * 3, ()))[3] + key.rows
                keys[key.key] = key.state, key.since_ms, key.failure, rows
        acked = group.acked.cursor, tuple(group.acked.ranges)
        known = self.parked.frozen, self.parked.adopted_parents, self.parked.messages
        attempts = {offset: n for offset, n in group.attempts.items() if offset not in group.acked}
        edits = dict(self.parked.list_edits())
        return group.lock.fence, acked, attempts, keys, known, edits

    async def make(self, *changes: ParkChange) -> None:
        """Make changes, without a check of the asker."""
        partition = self.store.state.partition(1)
        await change_parked(self.store, partition, self.group, changes, at_ms=self.clock.wall_ms())

    # ── of the owner ──────────────────────────────────────────────────────────────────────────────
    async def change(self, *changes: ParkChange, token: int = 1, session: str = SESSION) -> int:
        request = ChangeParked(1, "audit", session, token)
        return (await self.say(request, encode_parked(changes))).parked_version

    async def keys(
        self, first: int = 0, *, token: int = 1
    ) -> tuple[list[ParkedKeyRow], int | None]:
        request = ListParked(1, "audit", SESSION, token, first)
        answer, payload = await self.service.handle(request, memoryview(b""))
        return decode_key_rows(payload), answer.following

    async def rows(self, key: bytes | None, count: int = 100, *, token: int = 1) -> Any:
        return await self.say(ReadParked(1, "audit", SESSION, token, key, count))

    async def take(
        self, start: int = 0, end: int = 1024, first: int = 0, *, group: str = "audit"
    ) -> tuple[list[AdoptedKey], int | None]:
        request = AdoptParked(1, group, start, end, first)
        answer, payload = await self.service.handle(request, memoryview(b""))
        return decode_adopted(payload), answer.following

    async def acquired(self, token: int) -> Any:
        return await self.say(Acquire(1, "audit", SESSION, token, 2000))

    async def edit(
        self, key: bytes | None, offset: int, value: bytes, *, source: int = 1, props: bytes = b""
    ) -> Any:
        """Edit a parked message."""
        return await self.say(EditParked(1, "audit", key, source, offset, props), value)

    # ── of an operator ────────────────────────────────────────────────────────────────────────────
    async def listed(self, **params: Any) -> ParkedList:
        text = {name: str(value) for name, value in params.items()}
        return await self.parking.list_keys(None, {"id": "1", "group": "audit", **text})

    async def offsets(self, **params: Any) -> ParkedOffsets:
        text = {name: str(value) for name, value in params.items()}
        return await self.parking.list_offsets(None, {"id": "1", "group": "audit", **text})

    async def asked(
        self, key_hex: str | None, skip: list[tuple[int, int, int]] | None = None
    ) -> ParkedList:
        asked = ChangeParkedKey(group="audit", key_hex=key_hex, skip=skip)
        return await self.parking.change_key(asked, {"id": "1"})
