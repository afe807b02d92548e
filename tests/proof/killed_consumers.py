"""Consumers are killed with SIGKILL at any moment, under each failure policy, while messages are
sent, handlers fail, and an operator has what was set aside handled again.

Every policy has a group that is exclusive and one that is shared, all on one cluster. A member that
was killed is started again at once. At the end everything has to be handled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from keylane import Admin, Producer
from keylane.checker.events import Sent, Settled
from keylane.errors import GroupUnknownError
from keylane.producer.send_future import SendFuture
from keylane.rpc.http_network import HttpNetwork
from proof.cluster_history import hosted
from proof.group_member import MANNERS, TRIES_MAX, KilledMember
from proof.recording import Recorder
from proof.second_opinion import second_opinion
from support.cluster import Cluster
from support.server_process import ForkedProcess

PROGRAM = "from proof.group_member import run\nrun()\n"
STRICT, BEST_TRIED = "orders", "notes"
KEYS = 40
PER_SECOND = 60
"""Messages that are sent to each subject."""
LAG_MAX = 300
"""Messages that a group may be behind before the next second's are sent later."""
REST_S = 5.0
"""How much later at most: members of other groups wait for messages."""
LIFE_S = 0.4
"""The longest time from a process's first message to its end."""
FIRST_MESSAGE_S = 120.0
SETTLED_S = 300.0
MENDING_S = 1.5
"""Between two looks of the operator."""
EVERYTHING = 1 << 60
KILL_S = 30.0
LAST_WORDS = 2_000
"""Characters of a log."""
MEMBERS = 2
"""Consumers of each group at once."""
CONTROL_KILLS = 6


class PolicyGroup(NamedTuple):
    """A consumer group with its failure policy."""

    on_failure: str
    consume_strategy: str

    @property
    def name(self) -> str:
        return f"{self.on_failure}-{self.consume_strategy}"

    @property
    def subject(self) -> str:
        """Exclusive groups retry on best_tried subjects only."""
        return BEST_TRIED if self == ("retry", "exclusive") else STRICT

    def promise(self) -> dict[str, Any]:
        """What docs/CONSUMING.md and docs/PARKING.md promise of it, for the judge."""
        is_ordered = self.consume_strategy == "exclusive"
        if self.on_failure == "block":
            aside = "nothing"
        else:
            aside = "keys" if is_ordered and self.on_failure == "park" else "messages"
        tries = 1 if self == ("retry", "exclusive") else TRIES_MAX
        return {
            "subject": self.subject,
            "is_ordered": is_ordered,
            "sets_aside": aside,
            "tries": tries,
        }


GROUPS = [
    PolicyGroup(on_failure, consume_strategy)
    for on_failure in ("block", "park", "dead", "retry")
    for consume_strategy in ("exclusive", "shared")
]


class KilledConsumers:
    """One run on a cluster that has just been started."""

    def __init__(
        self, folder: Path, cluster: Cluster, *, kills: int, rng: random.Random, mutant: str
    ) -> None:
        """
        Args:
            kills: those of each group.
            mutant: a bug that is put into the members, for control runs; "": none.
        """
        self.killed: Counter[str] = Counter()
        """By group: processes that were killed while they lived and had got a message."""
        self._folder = folder
        self._cluster = cluster
        self._kills = kills
        self._rng = rng
        self._mutant = mutant
        self._alive: list[ForkedProcess] = []
        self._is_over = False
        self._sent = 0
        """Messages with a number below this one were sent to each subject."""

    async def run(self, groups: list[PolicyGroup]) -> None:
        """Kill until each group has its number, then have everything handled."""
        promises = {group.name: group.promise() for group in groups}
        (self._folder / "groups.json").write_text(json.dumps(promises))
        self._mend(0)
        await self._cluster.create(STRICT, partitions=4)
        await self._cluster.create(BEST_TRIED, partitions=4, strategy="best_tried")
        async with Producer(self._cluster.meta) as producer, Admin(self._cluster.meta) as admin:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._send(producer))
                    slots = itertools.product(groups, range(MEMBERS))
                    lives = [tasks.create_task(self._keep(*slot)) for slot in slots]
                    tasks.create_task(self._operate(admin, groups))
                    await asyncio.wait(lives)
                    self._is_over = True
                await self._settle(admin, groups)
            finally:
                for process in self._alive:
                    process.kill()

    # ── members ───────────────────────────────────────────────────────────────────────────────────
    async def _keep(self, group: PolicyGroup, slot: int) -> None:
        """Start a member again and again, and kill it; the last one stays."""
        log = self._folder / f"{group.name}-{slot}.log"
        for life in itertools.count():
            record = self._folder / f"{group.name}-{slot}-{life}.events"
            process = await asyncio.to_thread(self._start, group, slot, record, log)
            self._alive.append(process)
            until = time.monotonic() + FIRST_MESSAGE_S
            while not (record.exists() and record.stat().st_size):
                assert process.poll() is None, _last_words(process, log)
                assert time.monotonic() < until, f"{record.stem} got no message"
                await asyncio.sleep(0.01)
            await asyncio.sleep(LIFE_S * self._rng.random())
            assert process.poll() is None, _last_words(process, log)
            if self.killed[group.name] >= self._kills:
                return
            self.killed[group.name] += 1
            process.kill()
            status = await asyncio.to_thread(process.wait, KILL_S)
            assert status == -signal.SIGKILL, _last_words(process, log)
            self._alive.remove(process)

    def _start(self, group: PolicyGroup, slot: int, record: Path, log: Path) -> ForkedProcess:
        """Half of the members of an exclusive group have names that their successors keep."""
        is_named = slot % 2 == 1 and group.consume_strategy == "exclusive"
        member = KilledMember(
            meta=self._cluster.meta,
            subject=group.subject,
            group=group.name,
            on_failure=group.on_failure,
            consume_strategy=group.consume_strategy,
            manner=self._rng.choice(MANNERS),
            instance=f"member-{slot}" if is_named else "",
            record=str(record),
            mended=str(self._folder / "mended"),
            mutant=self._mutant,
        )
        arguments = [msgspec.json.encode(member).decode()]
        with log.open("a") as errors:
            return ForkedProcess(PROGRAM, arguments, os.environ, {2: errors.fileno()})

    # ── messages ──────────────────────────────────────────────────────────────────────────────────
    async def _send(self, producer: Producer) -> None:
        """Send to both subjects, more slowly while a group is behind."""
        record = Recorder(self._folder / "producer.events")
        receipts: set[asyncio.Task[None]] = set()
        network = HttpNetwork()
        try:
            for number in itertools.count():
                if self._is_over:
                    break
                if number % PER_SECOND == 0:
                    until = time.monotonic() + REST_S
                    while await self._lag(network) > LAG_MAX and time.monotonic() < until:
                        await asyncio.sleep(0.1)
                for subject in (STRICT, BEST_TRIED):
                    value, key = f"{subject}:{number}".encode(), b"key-%d" % (number * 7 % KEYS)
                    is_strict = subject == STRICT
                    record(Sent(value, key, subject, number, is_strict))
                    future = producer.send(subject, value, key=key)
                    receipt = asyncio.create_task(_settle(future, value, record))
                    receipts.add(receipt)
                    receipt.add_done_callback(receipts.discard)
                self._sent = number + 1
                await asyncio.sleep(1 / PER_SECOND)
            await producer.flush()
            await asyncio.gather(*receipts)
        finally:
            await network.close()

    async def _lag(self, network: HttpNetwork) -> int:
        """How many messages the slowest group has not acked."""
        lags: Counter[str] = Counter()
        for status in await hosted(network, [broker.address for broker in self._cluster.brokers]):
            for group in status.groups:
                lags[group.group] += status.next_offset - group.cursor
        return max(lags.values(), default=0)

    # ── the operator ──────────────────────────────────────────────────────────────────────────────
    def _mend(self, number: int) -> None:
        """No message with a number below this one fails from now on."""
        new = self._folder / "mended.new"
        new.write_text(str(number))
        new.rename(self._folder / "mended")

    async def _operate(self, admin: Admin, groups: list[PolicyGroup]) -> None:
        """Mend what was sent a while ago, and have what was set aside handled again."""
        while not self._is_over:
            await asyncio.sleep(MENDING_S)
            self._mend(self._sent - PER_SECOND // 2)
            for group in groups:
                with contextlib.suppress(GroupUnknownError):
                    await admin.redrive(group.subject, group.name, all=True)

    async def _settle(self, admin: Admin, groups: list[PolicyGroup]) -> None:
        """Mend everything, and wait until all of it is handled and nothing is set aside."""
        self._mend(EVERYTHING)
        left: dict[str, int] = {}
        try:
            async with asyncio.timeout(SETTLED_S):
                while not left or any(left.values()):
                    await asyncio.sleep(0.2)
                    left = {group.name: await self._left(admin, group) for group in groups}
        except TimeoutError:
            if not self._mutant:  # with one, the judge counts what it did
                raise AssertionError(f"messages that are left at the end: {left}") from None
        for process in self._alive:
            assert process.poll() is None, f"a member ended with {process.wait()}"

    async def _left(self, admin: Admin, group: PolicyGroup) -> int:
        """Messages that are not acked, and those that are set aside, which are redriven."""
        await admin.redrive(group.subject, group.name, all=True)
        aside = [
            view.messages async for view in admin.parked(group.subject, group.name, retrying=True)
        ]
        return sum(aside) + await admin.lag(group.subject, group.name)


async def _settle(future: SendFuture, value: bytes, record: Recorder) -> None:
    receipt = await future
    twice = receipt.duplicate == "possible"
    place = (receipt.partition_id, receipt.offset)
    record(Settled(value, "stored", *place, receipt.reordered, twice))


def _last_words(process: ForkedProcess, log: Path) -> str:
    return f"a member ended with {process.wait()}: {log.read_text()[-LAST_WORDS:]}"


async def kill_consumers(
    folder: Path, kills: int, *, groups: list[PolicyGroup] = GROUPS, seed: int = 1, mutant: str = ""
) -> dict[str, Any]:
    """Kill this many consumers of each group; return `killed` by group, and the judge's verdict."""
    with Cluster(folder) as cluster:
        rng = random.Random(seed)
        run = KilledConsumers(folder, cluster, kills=kills, rng=rng, mutant=mutant)
        await run.run(groups)
    return {"killed": dict(run.killed), "judge": second_opinion(folder)}


async def count_harm(folder: Path, mutant: str, kind: str) -> int:
    """Return how many findings of a kind the judge has when members have a bug."""
    block = PolicyGroup("block", "exclusive")
    told = await kill_consumers(folder, CONTROL_KILLS, groups=[block], mutant=mutant)
    return told["judge"]["findings"].get(kind, 0)
