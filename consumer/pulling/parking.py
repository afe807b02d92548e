"""The parked messages of one partition, at its owner: new ones of a parked key go to the broker, not to handlers.

    pulled ─▶ divert ─┬─ its key is parked ─▶ ParkQueue ─▶ ChangeParked ─▶ durable: counted as handled
                      ╰─ others ─▶ handed out ─▶ failed too often: park ─▶ ParkQueue
    the broker's version changed ─▶ ListParked ─▶ a key to redrive ─▶ Redrive (`redrive.py`) ─▶ free ─▶ as any other

Before the first pull the owner of a child takes over what its parents have parked.

Invariants
    From the call of `park` on no message of its key is handed out, until the broker has confirmed that the key is free.
    What the broker has no room to park stays here, not acked; nothing is pulled while it is WAITING_MAX messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from ...protocol.control import Grant
from ...protocol.errors import (
    FencedError,
    KeylaneError,
    ParkFullError,
    ParkMovedError,
    PartitionUnknownError,
    UnreachableError,
)
from ...protocol.frames import (
    Acquired,
    ChangeParked,
    LeaveParked,
    ListParked,
    ParkedChanged,
    ParkedKeys,
    ParkedRows,
    ParkedTaken,
    ReadParked,
    TakeParked,
)
from ...protocol.message import Message
from ...protocol.operations import SubjectHistory
from ...protocol.parked import (
    LOOSE,
    Adopt,
    AncestorTold,
    Failure,
    ParkChange,
    ParkedKeyRow,
    ParkKey,
    ParkState,
    decode_adopted,
    decode_key_rows,
    encode_parked,
)
from ...protocol.routing import Partition
from ...rpc.client import BrokerClient
from ..settings import ConsumerSettings
from .park_queue import ParkQueue

log = logging.getLogger("keylane.consumer")

WAITING_MAX = 10_000
"""Messages that wait to be parked at the broker; their values are not kept."""


class ParkOwner(Protocol):
    """What parking needs of its pull client, and of the consumer."""

    @property
    def broker(self) -> BrokerClient:
        """The client of the partition's broker."""
        ...

    @property
    def acked_to_end(self) -> bool:
        """True when the partition is sealed, and its group has acked it to the end."""
        ...

    def broker_at(self, address: str) -> BrokerClient:
        """The client of another broker."""
        ...

    async def history(self) -> SubjectHistory:
        """Every partition that the subject ever had."""
        ...

    def spawn(self, body: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None] | None:
        """Run a task that ends with the pull client, or ends it; None once that hands over."""
        ...

    async def pause(self, failures: int) -> None:
        """Wait before the next try."""
        ...

    def hand_out(self, messages: list[Message]) -> None:
        """Count messages as handed out, and give them to handlers or the iteration."""
        ...

    def settled(self) -> None:
        """Take note that a change is durable, or a redrive ended."""
        ...


class KeyParking:
    """
    What is parked of one partition under one grant.

    Args:
        who: partition id, group, session and token, as requests name the owner.
    """

    def __init__(
        self,
        owner: ParkOwner,
        grant: Grant,
        who: tuple[int, str, str, int],
        *,
        settings: ConsumerSettings,
        rng: random.Random,
    ) -> None:
        self.keys: set[ParkKey] = set()
        """Keys whose messages are not handed out."""
        self.has_parked = False
        """True once something was parked on the partition, here or before."""
        self.version = 0
        """The broker's, when its keys were listed last; 0: nothing is parked."""
        self.redrive: Callable[[ParkKey], None] = lambda _key: None
        """Begins to have the messages of a key handled again."""
        self._owner = owner
        self._grant = grant
        self._who = who
        self._settings = settings
        self._rng = rng
        self._queue = ParkQueue()
        self._due = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None
        self._unneeded: tuple[int, ...] = ()
        """Ancestors that keep messages for the group though none of them is parked here."""
        self._leaving: asyncio.Task[None] | None = None
        self._asked: set[int] = set()
        """Parents that were asked at the address in the grant."""
        self._room = asyncio.Event()
        """Set when a request is durable."""
        self._freeing: dict[ParkKey, list[Message]] = {}
        """Keys that are freed, with the messages that came meanwhile."""
        self._freed_lately: set[ParkKey] = set()
        """Keys that were freed since the last listing began."""

    @property
    def busy(self) -> bool:
        """True while a change is not durable."""
        return bool(self._queue)

    async def wait_for_room(self) -> None:
        """Wait while too many messages wait to be parked."""
        while self._queue.messages >= WAITING_MAX:
            self._room.clear()
            await self._room.wait()

    # ── what the broker has ──────────────────────────────────────────────────────────────────────────
    async def begin(self, answer: Acquired) -> None:
        """Take over what the parents have parked, if that is not done, and learn which keys are parked."""
        version = answer.parked_version
        for parent in self._grant.parked_parents:
            if int(parent.partition_id) not in answer.adopted:
                version = await self._adopt(parent)
        if version:
            await self.refresh()
        if self._unneeded:
            self._let_go()

    async def _adopt(self, parent: Partition) -> int:
        parent_id, address = int(parent.partition_id), parent.address
        if address is None or parent_id in self._asked:
            address = await self._address_of(parent_id)
        self._asked.add(parent_id)
        broker, partition = self._owner.broker_at(address), self._grant.partition
        version = first = 0
        taken = 0
        while True:
            request = TakeParked(
                parent_id, self._who[1], partition.range_start, partition.range_end, first
            )
            answer, payload = await broker.call(request)
            assert isinstance(answer, ParkedTaken)
            keys = tuple(decode_adopted(payload))
            taken += sum(end - start for key in keys for _, start, end in key.rows)
            last = answer.following is None
            version = await self._send([Adopt(parent_id, keys, last, answer.sources)])
            if answer.following is None:
                break
            first = answer.following
        if taken:
            log.info(
                "partition %d takes over %d parked messages of parent %d",
                self._who[0], taken, parent_id,
            )  # fmt: skip
        return version

    async def _address_of(self, partition_id: int) -> str:
        """The address of a partition's broker, which may have changed since the grant.  Raises KeylaneError."""
        history = await self._owner.history()
        for part in history.partitions:
            if part.partition.partition_id == partition_id and part.partition.address:
                return part.partition.address
        raise UnreachableError(
            f"the broker of partition {partition_id} is away, and has parked messages of the group"
        )

    async def refresh(self) -> None:
        """Learn which keys are parked, and begin to redrive those that an operator wants handled again."""
        self.has_parked = True
        self._freed_lately.clear()
        first: int | None = 0
        rows: list[ParkedKeyRow] = []
        version = 0
        while first is not None:
            answer, payload = await self._owner.broker.call(ListParked(*self._who, first))
            assert isinstance(answer, ParkedKeys)
            rows += decode_key_rows(payload)
            version, first = answer.parked_version, answer.following
            self._unneeded = answer.unneeded
        self.version = version
        rows = [row for row in rows if row.key not in self._freed_lately]
        self.keys.update(row.key for row in rows if row.key not in LOOSE)
        for row in rows:
            waits = row.key in self._freeing or self._queue.parks(row.key)
            if row.state is ParkState.REDRIVING and not waits:
                self.redrive(row.key)

    async def first_rows(self, key: ParkKey, count: int) -> tuple[tuple[int, int, int], ...]:
        """Where the first parked messages of a key are, as (source, start, end)."""
        answer, _ = await self._owner.broker.call(ReadParked(*self._who, key, count))
        assert isinstance(answer, ParkedRows)
        return answer.rows

    async def _send(self, changes: Iterable[ParkChange]) -> int:
        payload = encode_parked(list(changes))
        answer, _ = await self._owner.broker.call(ChangeParked(*self._who), payload)
        assert isinstance(answer, ParkedChanged)
        return answer.parked_version

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────
    def divert(self, messages: list[Message]) -> list[Message]:
        """Park the messages whose keys are parked; returns the others."""
        keys, others = self.keys, []
        diverted: dict[bytes, list[Message]] = {}
        for message in messages:
            if message.key in keys:
                diverted.setdefault(message.key, []).append(message)
            else:
                others.append(message)
        for key, behind in diverted.items():
            held = self._freeing.get(key)
            if held is not None:
                held += behind
            else:
                self._put(key, [message.offset for message in behind], None)
        return others

    def park(self, key: ParkKey, offsets: list[int], failure: Failure) -> None:
        """
        Set messages aside because the first of them fails; all later ones of the key follow them.

        Args:
            offsets: sorted, of the partition itself; none if they are parked there already.
        """
        if key not in LOOSE:
            self.keys.add(key)
        self._put(key, offsets, failure)

    def _put(self, key: ParkKey, offsets: list[int], failure: Failure | None) -> None:
        self.has_parked = True
        self._queue.park(key, offsets, failure)
        self._wake()

    def done(self, key: ParkKey, source: int, offset: int, confirmed: Callable[[], None]) -> None:
        """Note that a redriven message is handled."""
        self._queue.unpark(key, source, offset, offset + 1, confirmed)
        self._wake()

    def drop_lost(
        self, key: ParkKey, source: int, start: int, end: int, confirmed: Callable[[], None]
    ) -> None:
        """Give up parked messages that are stored no longer."""
        self._queue.unpark(key, source, start, end, confirmed)
        self._wake()

    def has_parks(self, key: ParkKey) -> bool:
        """True if messages of this key wait to be parked."""
        return self._queue.parks(key)

    def free(self, key: ParkKey) -> None:
        """Hand a redriven key's messages out as any other, from when the broker has confirmed it."""
        self._freeing[key] = []
        self._queue.free(key, lambda: self._freed(key))
        self._wake()

    def _freed(self, key: ParkKey) -> None:
        held = self._freeing.pop(key)
        self.keys.discard(key)
        self._freed_lately.add(key)
        self._let_go()
        if held:
            self._owner.hand_out(held)

    def _wake(self) -> None:
        self._due.set()
        if self._sending is None:
            self._sending = self._owner.spawn(self._run, f"park {self._who[0]}")

    # ── ancestors ────────────────────────────────────────────────────────────────────────────────────
    def _let_go(self) -> None:
        """Begin to tell ancestors that nothing of them is parked any more; what fails is tried when the next key is free."""
        if self._grant.partition.parents and self._leaving is None:
            self._leaving = self._owner.spawn(self._leave, f"leave {self._who[0]}")

    async def _leave(self) -> None:
        try:
            await self.refresh()
            for source in self._unneeded:
                with contextlib.suppress(PartitionUnknownError):
                    broker = self._owner.broker_at(await self._address_of(source))
                    partition = self._grant.partition
                    ask = LeaveParked(
                        source, self._who[1], partition.range_start, partition.range_end
                    )
                    await broker.call(ask)
                await self._send([AncestorTold(source)])
        except FencedError:
            raise
        except KeylaneError as error:
            log.info("parked messages of partition %d: %s", self._who[0], error.message)
        finally:
            self._leaving = None

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────
    async def _run(self) -> None:
        pauses = self._settings.backoff.pauses(self._rng)
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                while self._queue:
                    await self.send_some()
                    pauses.reset()
                self._owner.settled()
            except FencedError:
                raise
            except ParkFullError as error:
                if pauses.failures == 0:
                    log.warning("partition %d: %s", self._who[0], error)
                self._due.set()
                await asyncio.sleep(pauses.next_ms() / 1000)
            except KeylaneError as error:
                log.info("parked messages of partition %d: %s", self._who[0], error.message)
                self._due.set()
                await asyncio.sleep(pauses.next_ms() / 1000)

    async def send_some(self) -> None:
        """
        Send one request.

        Raises:
            ParkFullError: the broker takes no park now; try again in a while.
            KeylaneError: it may be sent again.
        """
        changes = self._queue.take()
        try:
            await self._send(changes)
        except ParkFullError:
            waited = self._queue.full and len(changes) == 1
            self._queue.refused()
            if waited:
                raise
        except ParkMovedError:
            # The children have them: what is left here has no effect any more.
            self._queue.confirmed()
        else:
            self._queue.confirmed()
        self._room.set()

    def settled(self) -> None:
        """Take note that a redrive ended."""
        self._owner.settled()

    async def flush(self) -> None:
        """Send all changes that are left; those that the broker has no room for are left out."""
        while self._queue:
            try:
                await self.send_some()
            except ParkFullError:
                return
