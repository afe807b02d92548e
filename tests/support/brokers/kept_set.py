"""A broker whose acks may wait for copies, and the metaserver that stores which ones."""

from __future__ import annotations

import asyncio
import random

from msgspec.structs import replace

from keylane.broker.copies.set_keeper import SetKeeper
from keylane.broker.metrics import collect_copy_set
from keylane.broker.storage.data_folder import claim_folder
from keylane.protocol.copies import ChangeCopySet, CopySet, OfferPlace
from keylane.protocol.errors import KeylaneError
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, in_place, open_store

COPY_ID = "c" * 32


class KeptSet:
    """
    A broker's keeper, and the set that its metaserver stores.

    Args:
        disk: an earlier one of the broker's.
    """

    def __init__(self, disk: SimDisk | None = None, *, stored: CopySet | None = None) -> None:
        self.clock, self.disk = ManualClock(), disk or SimDisk()
        claim_folder(self.disk, broker_group="g1", rng=random.Random(1))
        self.desk = Desk(open_store(self.disk, clock=self.clock), self.clock)
        self.stored = stored or CopySet(wanted=2)
        self.asked: list[ChangeCopySet] = []
        self.error: KeylaneError | None = None
        """What the metaserver answers; None: the set."""
        self.loses_answers = False
        self.fault: Exception | None = None
        """What a call raises."""
        self.is_registered = True
        self.known = asyncio.Event()
        self.known.set()
        self.offers: list[str] = []
        """The copies to which the broker's place was offered."""
        self.copied = False
        """Whether the copies have what the log had at the start."""
        self.keeper = SetKeeper(
            self.desk.store,
            self.disk,
            broker_group="g1",
            broker_id="b1",
            opening="o1",
            change=self.change,
            offer=self.offer,
            known=self.known,
            is_registered=lambda: self.is_registered,
            run_blocking=in_place,
            clock=self.clock,
            rng=random.Random(1),
            lag_ms=2_000,
        )
        self.keeper.on_copied = self._note_copied
        self._task: asyncio.Task[None] | None = None

    def _note_copied(self) -> None:
        self.copied = True

    def start(self) -> None:
        self._task = asyncio.ensure_future(self.keeper.run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def change(self, request: ChangeCopySet) -> CopySet:
        self.asked.append(request)
        if self.fault is not None:
            raise self.fault
        if self.error is not None and not self.loses_answers:
            raise self.error
        if request.members is not None and request.version == self.stored.version:
            self.stored = replace(
                self.stored, members=request.members, version=self.stored.version + 1
            )
        if self.error is not None:
            raise self.error
        return self.stored

    async def offer(self, request: OfferPlace) -> CopySet:
        self.offers.append(request.copy_id)
        if self.error is not None:
            raise self.error
        return self.stored

    def report(self, copy_id: str = COPY_ID) -> None:
        """As a copy that has synced everything that is written."""
        self.keeper.note_report(copy_id, self.desk.store.log.written_end)

    async def figures(self) -> dict[str, float]:
        return {
            sample.name: sample.value
            for family in await collect_copy_set(self.keeper)
            for sample in family.samples
            if not sample.labels
        }
