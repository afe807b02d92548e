"""The faults of a long run: of every kind, overlapping, while partitions change under load."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keylane.checker.findings import Findings
from proof.stage import Stage

HOUR_S = 3_600


@dataclass(slots=True)
class StoryResult:
    """The result of a story."""

    findings: Findings
    events: Counter[str]
    faults: Counter[str] = field(default_factory=Counter)
    verdict: dict[str, Any] = field(default_factory=dict)
    """The judge's, once the programs have ended; see `second_opinion`."""

    @property
    def messages(self) -> int:
        return self.events["Stored"]


class Story:
    """Brings faults upon a stage, every kind as often as the others, in an order drawn by `rng`."""

    def __init__(self, stage: Stage, rng: random.Random, *, pause_ttls_max: float) -> None:
        self.faults: Counter[str] = Counter()
        self._stage = stage
        self._rng = rng
        self._pause_ttls_max = pause_ttls_max
        self._under_way: list[asyncio.Task[None]] = []
        self._busy: set[str] = set()
        """Programs and ways that a fault has now."""
        self._deck: list[str] = []
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "pause in a handler": self._pause,
            "consumer killed": lambda: self._crash(stage.consumers),
            "broker killed": lambda: self._crash(stage.brokers),
            "metaserver killed": lambda: self._crash(["m"]),
            "producer killed": lambda: self._crash(["p"]),
            "consumer-metaserver cut": lambda: self._cut(stage.consumers, ["m"]),
            "consumer-broker cut": lambda: self._cut(stage.consumers, stage.brokers),
            "broker-metaserver cut": lambda: self._cut(stage.brokers, ["m"]),
            "metaserver-broker cut": lambda: self._cut(["m"], stage.brokers),
            "calendar moved": lambda: self._move_calendar(list(stage.actors)),
            "calendar of one program moved": lambda: self._move_calendar(
                [self._rng.choice(list(stage.actors))]
            ),
        }

    @property
    def never_struck(self) -> set[str]:
        """Kinds of faults that have not struck yet."""
        return set(self._kinds) - set(self.faults)

    async def run(self, resizes: Sequence[int], *, faults_each: int, gap_s: float) -> None:
        """Bring `faults_each` faults during each resize, about `gap_s` apart."""
        for count in resizes:
            resize = asyncio.create_task(self._stage.resize(count))
            for _ in range(faults_each):
                await asyncio.sleep(gap_s * 2 * self._rng.random())
                self.strike()
            await resize
            self.faults["resize"] += 1
        await asyncio.gather(*self._under_way)

    def strike(self) -> None:
        """The next fault of the deck, in a task of its own."""
        if not self._deck:
            self._deck = list(self._kinds)
            self._rng.shuffle(self._deck)
        name = self._deck.pop()
        self._under_way.append(asyncio.create_task(self._suffer(name)))

    async def _suffer(self, name: str) -> None:
        self.faults[name] += 1
        await self._kinds[name]()

    async def told(self) -> StoryResult:
        """Heal, drain and judge."""
        self._stage.set_calendar(0)
        findings, events = await self._stage.judge()
        return StoryResult(findings, Counter(type(event).__name__ for event in events), self.faults)

    # ── faults ────────────────────────────────────────────────────────────────────────────────────
    async def _free(self, names: Sequence[str]) -> str:
        """Reserve an actor that no other fault uses."""
        while True:
            free = [name for name in names if name not in self._busy]
            if free:
                name = self._rng.choice(free)
                self._busy.add(name)
                return name
            await asyncio.sleep(0.05)

    async def _pause(self) -> None:
        ttls = self._rng.uniform(1.0, self._pause_ttls_max)
        await self._stage.pause_in_handler(ttls * self._stage.ttl_s, self._busy, self._rng)

    async def _crash(self, names: Sequence[str]) -> None:
        name = await self._free(names)
        await self._stage.crash(name, down_s=self._rng.choice((0.0, 0.5)) * self._rng.random())
        self._busy.discard(name)

    async def _cut(self, sources: Sequence[str], targets: Sequence[str]) -> None:
        ways = [f"{source}>{target}" for source in sources for target in targets]
        way = await self._free(ways)
        source, target = way.split(">")
        up, down = self._rng.choice(((True, True), (True, False), (False, True)))
        seconds = self._stage.ttl_s * self._rng.uniform(0.3, 3.0)
        reset = self._rng.random() < 0.5
        await self._stage.cut(source, target, seconds, up=up, down=down, reset=reset)
        self._busy.discard(way)

    async def _move_calendar(self, names: Sequence[str]) -> None:
        self._stage.set_calendar(self._rng.choice((-HOUR_S, HOUR_S)), names)
