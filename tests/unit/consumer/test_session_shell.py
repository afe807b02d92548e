"""A session, its shell and its workers, beside a real broker on a simulated disk, in virtual time: a
seed decides everything.
"""

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest

from keylane.consumer.delivery.suspect_lock import SuspectLock
from keylane.consumer.dispatch.handler import HandlerDispatch
from keylane.consumer.session.events import LeaseGranted, Stopped
from keylane.consumer.session.state import PartitionSession
from keylane.consumer.session_shell import SessionShell
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.batch import encode_batch
from keylane.protocol.errors import UnreachableError
from keylane.protocol.parked import failure_of
from keylane.testing.machines.disk import SimDisk
from keylane.testing.machines.loop import SimLoop
from keylane.testing.machines.machine import Machine
from sim.machines.store import Desk, open_store

KEYS = (b"", b"a", b"b", b"c", b"d")
MESSAGES = 200
PAUSES = Backoff(first_ms=5, max_ms=50)


class SlowLine:
    """The way to the broker: slow, and at times without an answer."""

    def __init__(self, desk: Desk, rng: random.Random) -> None:
        self._desk = desk
        self._rng = rng
        self.is_calm = False

    async def call(self, request: Any, payload: bytes = b"", *, wait_ms: int = 0) -> Any:
        rng = self._rng
        await asyncio.sleep(rng.random() / 100)
        dice = 1.0 if self.is_calm else rng.random()
        if dice < 0.05:
            raise UnreachableError("the request is lost")
        answer, data = await self._desk.ask(request, payload)
        await asyncio.sleep(rng.random() / 100)
        if dice < 0.1:
            raise UnreachableError("the answer is lost")
        return answer, memoryview(data)


class ShellStory:
    """Owners of one partition that follow each other, until it is drained."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.clock = Machine(loop, "host", rate=1.0, boot_s=1_000)
        self.desk = Desk(open_store(SimDisk(), clock=self.clock), self.clock)
        self.line = SlowLine(self.desk, rng)
        self.keys = [rng.choice(KEYS) for _ in range(MESSAGES)]
        self.handled: dict[bytes, list[int]] = defaultdict(list)
        self.inside: dict[bytes, int] = defaultdict(int)
        self.waits = rng.random() < 0.7
        self.settings = ConsumerSettings(
            ttl_ms=10_000,
            pull_wait_ms=200,
            buffer_messages=rng.choice((10, 1_000)),
            backoff=PAUSES,
            handler_backoff=PAUSES,
            ack=rng.choice(("lingering", "each")),
        )

    async def handle(self, message: Any) -> None:
        key, rng = message.key, self.rng
        if key:
            self.inside[key] += 1
            assert self.inside[key] == 1, f"two messages of {key!r} at once"
        try:
            if self.waits and rng.random() < 0.5:
                await asyncio.sleep(rng.random() / 20)
            if not self.line.is_calm and rng.random() < 0.1:
                raise ValueError("bad")
            self.handled[key].append(message.offset)
        finally:
            if key:
                self.inside[key] -= 1

    async def own(self, token: int, *, is_last: bool) -> None:
        """One owner: it ends by a stop, by its death, or when the partition is drained."""
        errors: list[BaseException] = []
        dispatch = HandlerDispatch(
            self.handle,
            concurrency=4,
            clock=self.clock,
            build_failure=lambda error, attempts: failure_of(
                error, client="c", at_ms=self.clock.wall_ms(), attempts=attempts
            ),
        )
        lease = (1, "audit", f"session-{token}", token)
        session = PartitionSession(lease, self.settings, random.Random(self.rng.random()))
        shell = SessionShell(
            session,
            subject="flights",
            broker=self.line,
            clock=self.clock,
            dispatch=dispatch,
            turn=SuspectLock(),
            locate=lambda source: pytest.fail(f"partition {source} is not there"),
            on_error=errors.append,
        )
        left_s = 600.0 if is_last else self.rng.random()
        while left_s > 0 and not (session.is_drained or shell.ended.is_set() or errors):
            shell.feed(LeaseGranted(self.clock.boot_ms() + 9_000))
            pause_s = min(left_s, 1.0)
            await asyncio.sleep(pause_s)
            left_s -= pause_s
        assert not errors, errors
        if is_last:
            assert session.is_drained
        if is_last or self.rng.random() < 0.5:
            shell.feed(Stopped(1_000))
            async with asyncio.timeout(60):
                await shell.ended.wait()
        shell.close()
        await dispatch.close()

    async def run(self) -> None:
        await self.desk.host()
        data = encode_batch(
            partition_id=1,
            sent_at_ns=[0] * MESSAGES,
            keys=self.keys,
            values=[b"v"] * MESSAGES,
            producer_id=7,
            producer_epoch=0,
            sequence=0,
        )
        await self.desk.append(data)
        await self.desk.store.seal(1)[1]
        owners = self.rng.randint(0, 3)
        for token in range(1, owners + 1):
            await self.own(token, is_last=False)
        self.line.is_calm = True
        await self.own(owners + 1, is_last=True)
        for key, offsets in self.handled.items():
            if key:
                first = list(dict.fromkeys(offsets))
                assert first == sorted(first), f"order of {key!r}: {offsets}"
        assert {each for offsets in self.handled.values() for each in offsets} == set(
            range(MESSAGES)
        )


@pytest.mark.parametrize("seed", range(20))
def test_partition_is_handled_to_its_end_in_order(seed):
    rng = random.Random(seed)
    loop = SimLoop(rng)
    asyncio.set_event_loop(loop)
    try:
        story = ShellStory(loop, rng)
        loop.run_until_complete(story.run())
    finally:
        loop.close()
        asyncio.set_event_loop(None)
