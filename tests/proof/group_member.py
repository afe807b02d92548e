"""A consumer that is killed at any moment, a process of its own: it handles messages in one of four
ways, and some of them fail.

Its argument is a `KilledMember` as JSON. Of every message that it gets, it writes down at once that
its handling begins, and how that ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from keylane import Consumer, ConsumerSettings, Message
from keylane.errors import LeaseLostError
from keylane.protocol.backoff import Backoff
from proof.recording import Recorder
from support.observation import dropped, ended, started

TTL_MS = 2_000
TRIES_MAX = 3
HANDLER_S = 0.008
"""The longest time that the handling of a message takes."""
SHAKY, SHAKY_PLACE = 7, 3
"""Of seven messages one fails at its first try, unless it is mended."""
POISON, POISON_PLACE = 23, 5
"""Of twenty-three messages one fails until it is mended."""
BATCH = 20

MANNERS = ("handler", "batch handler", "loop", "loop of many")


class KilledMember(msgspec.Struct, frozen=True):
    """Says which consumer a process runs."""

    meta: str
    subject: str
    group: str
    on_failure: str
    consume_strategy: str
    manner: str
    """One of `MANNERS`."""
    instance: str
    record: str
    """The file that gets what its handlers do."""
    mended: str
    """The file with the number below which no message fails."""
    mutant: str = ""
    """A bug that is put in, for control runs."""


class MemberWork:
    """The handling of messages."""

    def __init__(self, member: KilledMember) -> None:
        self._group = member.group
        self._mended = Path(member.mended)
        self._record = Recorder(Path(member.record))
        self._rng = random.Random(member.record)

    async def handle(self, message: Message) -> None:
        """Handle a message, or fail as it makes handlers fail."""
        self._record(started(message, group=self._group, clock_ns=0, ours=True))
        try:
            await asyncio.sleep(HANDLER_S * self._rng.random())
            if self._fails(message):
                raise ValueError("cannot take it")
        except BaseException:
            self._record(dropped(message))
            raise
        self._record(ended(message, group=self._group))

    async def handle_all(self, messages: list[Message]) -> None:
        """Handle a batch, which fails as a whole."""
        handled: list[Message] = []
        try:
            for message in messages:
                await self.handle(message)
                handled.append(message)
        except BaseException:
            for message in handled:
                self._record(dropped(message))
            raise

    async def take(self, consumer: Consumer) -> None:
        """Handle each message of a loop."""
        async for message in consumer:
            with suppress(LeaseLostError):
                try:
                    await self.handle(message)
                except ValueError:
                    await message.nack()
                else:
                    await message.ack()

    async def take_many(self, consumer: Consumer) -> None:
        """Handle many messages in each turn of a loop; one that fails takes back later ones of its
        key.
        """
        while True:
            failed: dict[bytes, Message] = {}
            handled: list[Message] = []
            for message in await consumer.getmany(max_records=BATCH, timeout_ms=200):
                if message.key in failed:
                    continue
                try:
                    await self.handle(message)
                    handled.append(message)
                except ValueError:
                    failed[message.key] = message
            with suppress(LeaseLostError):
                await consumer.ack(handled)
            with suppress(LeaseLostError):
                await consumer.nack(list(failed.values()))

    def _fails(self, message: Message) -> bool:
        number = int(message.value.rpartition(b":")[2])
        is_poison = number % POISON == POISON_PLACE
        is_shaky = number % SHAKY == SHAKY_PLACE and message.attempt == 1
        return (is_poison or is_shaky) and number >= int(self._mended.read_text())


async def main(member: KilledMember) -> None:
    work = MemberWork(member)
    handlers: dict[str, dict[str, Any]] = {
        "handler": {"handler": work.handle},
        "batch handler": {"batch_handler": work.handle_all},
    }
    loops: dict[str, Callable[[Consumer], Awaitable[None]]] = {
        "loop": work.take,
        "loop of many": work.take_many,
    }
    consumer = Consumer(
        member.meta,
        subject=member.subject,
        group=member.group,
        on_failure=member.on_failure,
        tries_max=TRIES_MAX,
        settings=ConsumerSettings(
            ttl_ms=TTL_MS,
            consume_strategy=member.consume_strategy,
            instance=member.instance,
            name=f"{member.manner} {os.getpid()}",
            max_records=BATCH,
            pull_wait_ms=1_000,
            handler_backoff=Backoff(first_ms=10, max_ms=50),
            retry_backoff=Backoff(first_ms=20, max_ms=100),
        ),
        **handlers.get(member.manner, {}),
    )
    if member.manner in handlers:
        await consumer.run()
        return
    async with consumer:
        await loops[member.manner](consumer)


def run() -> None:
    """Handle messages until the process is killed."""
    member = msgspec.json.decode(sys.argv[1], type=KilledMember)
    if member.mutant:
        from sim.mutants.bank import MUTANTS
        from sim.mutants.mutant import Patches

        MUTANTS[member.mutant].breaks(Patches())
    asyncio.run(main(member))
