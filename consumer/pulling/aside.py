"""What a pull client has set aside, and has handled again: `parking.py` and `redrive.py` with their tasks.

PullClient ─▶ Aside ─┬─▶ KeyParking ─▶ ParkQueue
╰─▶ Redrives
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

from ...protocol.control import Grant
from ...protocol.frames import Acquired
from ...protocol.message import Message
from ...protocol.operations import SubjectHistory
from ...protocol.parked import Failure, ParkKey
from ...rpc.client import BrokerClient
from ...rpc.connections import Connections
from ..settings import ConsumerSettings
from .parking import KeyParking
from .redrive import Redrives

log = logging.getLogger("keylane.consumer")


class AsideClient(Protocol):
    """What this needs of its pull client."""

    @property
    def broker(self) -> BrokerClient:
        """The client of the partition's broker."""
        ...

    @property
    def acked_to_end(self) -> bool:
        """True when the partition is sealed, and its group has acked it to the end."""
        ...

    async def run(self, body: Callable[[], Awaitable[None]]) -> None:
        """Run the body of a task, whose error ends the client or the consumer."""
        ...

    def hand_out(self, messages: list[Message]) -> None:
        """Count messages as handed out, and give them to handlers or the iteration."""
        ...

    def settled(self) -> None:
        """Take note that a change is durable, or a redrive ended."""
        ...


class AsideOwner(Protocol):
    """What this needs of the consumer."""

    @property
    def redrives(self) -> bool:
        """Whether it takes parked messages that are handled again."""
        ...

    async def history(self) -> SubjectHistory:
        """Every partition that the subject ever had."""
        ...


class Aside:
    """The parked messages of one partition under one grant; it is the `ParkOwner` of its parts."""

    def __init__(
        self,
        client: AsideClient,
        owner: AsideOwner,
        grant: Grant,
        who: tuple[int, str, str, int],
        *,
        subject: str,
        connections: Connections,
        settings: ConsumerSettings,
        rng: random.Random,
    ) -> None:
        self._client = client
        self._owner = owner
        self._connections = connections
        self._settings = settings
        self._rng = rng
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._told = False
        self._parking = KeyParking(self, grant, who, settings=settings, rng=rng)
        self._redrives = Redrives(client, self, self._parking, grant, who, subject=subject)
        self._parking.redrive = self._redrive
        self.keys = self._parking.keys
        """Keys whose messages are not handed out."""

    # ── called by the pull client ────────────────────────────────────────────────────────────────────
    @property
    def has_parked(self) -> bool:
        """True if something may be parked."""
        return self._parking.has_parked

    @property
    def busy(self) -> bool:
        """True while a change is not durable, or a parked message is with handlers."""
        return self._parking.busy or self._redrives.busy

    async def begin(self, answer: Acquired) -> None:
        """Take over what the parents have parked, if that is not done, and learn which keys are parked."""
        await self._parking.begin(answer)

    def note(self, version: int) -> None:
        """Note that something is parked, if a version of the broker's says so."""
        if version:
            self._parking.has_parked = True

    async def seen(self, version: int) -> None:
        """Learn what an operator has changed, if a version of the broker's is newer than the one that is known."""
        if version > self._parking.version:
            await self._parking.refresh()

    def divert(self, messages: list[Message]) -> list[Message]:
        """Park the messages whose keys are parked; returns the others."""
        return self._parking.divert(messages)

    async def wait_for_room(self) -> None:
        """Wait while too many messages wait to be parked."""
        await self._parking.wait_for_room()

    def park(self, key: ParkKey, offsets: list[int], failure: Failure) -> None:
        """Set messages aside because the first of them fails."""
        self._parking.park(key, offsets, failure)

    def stop(self) -> list[asyncio.Task[None]]:
        """Begin nothing more; returns the tasks that end."""
        self._stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    async def flush(self) -> None:
        """Send all changes that are left."""
        await self._parking.flush()

    def _redrive(self, key: ParkKey) -> None:
        if self._owner.redrives:
            self._redrives.begin(key)
        elif not self._told:
            self._told = True
            log.warning(
                "parked messages are not handled again here: that needs a handler of one message, or an iteration"
            )

    # ── called by the parts ──────────────────────────────────────────────────────────────────────────
    @property
    def broker(self) -> BrokerClient:
        """The client of the partition's broker."""
        return self._client.broker

    @property
    def acked_to_end(self) -> bool:
        """True when the partition is sealed, and its group has acked it to the end."""
        return self._client.acked_to_end

    def broker_at(self, address: str) -> BrokerClient:
        """The client of another broker."""
        return self._connections.broker_at(address)

    async def history(self) -> SubjectHistory:
        """Every partition that the subject ever had."""
        return await self._owner.history()

    def spawn(self, body: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None] | None:
        """Run a task that ends with the pull client, or ends it; None once that hands over."""
        if self._stopped:
            return None
        task = asyncio.create_task(self._client.run(body), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def pause(self, failures: int) -> None:
        """Wait before the next try."""
        await asyncio.sleep(self._settings.backoff.wait_ms(failures, self._rng) / 1000)

    def hand_out(self, messages: list[Message]) -> None:
        """Count messages as handed out, and give them to handlers or the iteration."""
        self._client.hand_out(messages)

    def settled(self) -> None:
        """Take note that a change is durable, or a redrive ended."""
        self._client.settled()
