"""What users do beside sending and handling: the habits of a seed's users, and how often they show.

They draw from rng of their own. An object that is opened, closed, cancelled, copied or shared has
to keep what it promises, or to refuse with a typed error.

    seeded     producers and consumers get generators that repeat each other
    forked     objects are made once, before the processes begin; each process opens a copy
    reopen     an object is closed and opened again
    tasks      two tasks send at once
    flush      futures are not awaited; `flush` and `close` have to tell what was lost
    cancel     who waits is cancelled, and waits again: futures, flush, room, opening, closing, `wait`
    wrap       handlers are lambdas, decorated, partials, objects, functions that return tasks
    odd        handlers raise what handlers seldom raise
    stubborn   handlers run on for a while after they are cancelled
    redeploy   all consumers of a group are stopped and started, one after the other
    poison     handlers of some keys fail until long after everything else is healed
    run        consumers run until they are told to stop by a signal
    loops      another thread, with an event loop of its own, uses what is open in the first one
    share      one more group consumes without an order, all its consumers from all partitions
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from sim.swarm import Swarm

if TYPE_CHECKING:
    from sim.actors.consumers import ConsumerHost
    from sim.world import World

T = TypeVar("T")
SHARED = "shared"
"""The name of the group that consumes without an order."""
HABITS = (
    "seeded",
    "forked",
    "reopen",
    "tasks",
    "flush",
    "cancel",
    "wrap",
    "odd",
    "stubborn",
    "redeploy",
    "poison",
    "run",
    "share",
    "loops",
)
SHARES = (0.0, 0.2, 0.3, 0.5)
"""How many of the habits a seed's users have."""


def draw_habits(seed: int) -> frozenset[str]:
    """The habits of a seed's users; none in a quarter of all seeds."""
    rng = random.Random(f"users {seed}")
    share = rng.choice(SHARES)
    return frozenset(name for name in HABITS if rng.random() < share)


def for_users(seed: int, swarm: Swarm) -> Swarm:
    """The plan of a seed with what its users do."""
    habits = draw_habits(seed)
    plan = replace(swarm, habits=habits)
    if "poison" in habits:  # what waits behind a failing message takes its place in the buffer
        plan = replace(plan, consumer=plan.consumer | {"buffer_messages": 10_000})
    return plan


class Identities:
    """The operating system's source of ids, for one process; no two are given the same, but for
    those in `first`.
    """

    def __init__(self, rng: random.Random, first: Sequence[int] = ()) -> None:
        self._rng = rng
        self._first = list(first)

    def __call__(self, bits: int) -> int:
        return self._first.pop() if self._first else self._rng.getrandbits(bits)


@dataclass(frozen=True)
class _Original:
    made: Any
    parts: Sequence[Any]


class Preloaded:
    """Objects that a program made before it forked, by name; never opened where they were made."""

    def __init__(self) -> None:
        self._originals: dict[str, _Original] = {}

    def copy(self, name: str, make: Callable[..., Any], parts: Sequence[Any]) -> Any:
        """
        A process's copy of the object of that name.

        Args:
            make: makes the object out of `parts`, the first time.
            parts: what belongs to the process; the copy has these where the original has those it
                was made of.
        """
        original = self._originals.get(name)
        if original is None:
            original = self._originals[name] = _Original(make(*parts), parts)
        memo: dict[int, Any] = {
            id(old): new for old, new in zip(original.parts, parts, strict=True) if old is not None
        }
        kind = type(original.made)
        made = memo[id(original.made)] = kind.__new__(kind)
        # As memory is copied by a fork: the object itself may refuse to be copied.
        made.__dict__.update(copy.deepcopy(original.made.__dict__, memo))
        return made


async def cancelled(
    wait: Callable[[], Awaitable[T]], rng: random.Random, *, within_s: float = 0.3
) -> bool:
    """Wait for something in a task that is cancelled at a random moment; True if it was done by
    then, and well.
    """
    task: asyncio.Future[T] = asyncio.ensure_future(wait())
    for _ in range(int(4 * rng.random())):
        await asyncio.sleep(0)
    if not task.done() and rng.random() < 0.6:
        await asyncio.wait([task], timeout=within_s * rng.random() ** 2)
    task.cancel()
    await asyncio.wait([task])
    return not task.cancelled() and task.exception() is None


class Users:
    """Users of consumers: they stop, start and reopen them until the world is healed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"users' deeds {world.seed}")
        habits = world.swarm.habits
        self.deeds = [name for name in ("redeploy", "reopen") if name in habits]
        if "run" in habits and not self.deeds:
            self.deeds = ["redeploy"]

    async def work(self) -> None:
        """Act, one action after the other."""
        while True:
            await asyncio.sleep(6 * self._rng.random())
            if self._world.faults.healed:
                return
            name = self._rng.choice(self.deeds)
            self._world.faults.done += 1
            self._world.trace(f"users {name}")
            await (self._redeploy() if name == "redeploy" else self._reopen())

    async def _redeploy(self) -> None:
        """Deploy a new version: each consumer of a group is stopped, and started when it has
        ended.
        """
        group = f"group{self._rng.randrange(self._world.swarm.groups)}"
        for host in [consumer for consumer in self._world.consumers if consumer.group == group]:
            if not host.running or host.leaving or self._world.faults.healed:
                continue
            if "run" in self._world.swarm.habits and self._rng.random() < 0.7:
                host.stop()
            else:
                host.leave()
            await self._until_it_left(host)
            self._world.faults.restart(host)
            await asyncio.sleep(0.5 * self._rng.random())

    async def _until_it_left(self, host: ConsumerHost) -> None:
        for _ in range(100):
            if not host.leaving:
                return
            await asyncio.sleep(0.1)

    async def _reopen(self) -> None:
        host = self._rng.choice(self._world.consumers)
        host.reopen(2 * self._rng.random())
