"""Messages of best_tried subjects whose handlers fail: each waits alone, is tried at its times, and
is a dead letter in the end.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from keylane.broker.partition.park_views import list_parked_keys, list_parked_offsets
from keylane.broker.partition.partition import HostedPartition
from keylane.checker.events import Event, Sent, Served, Settled, Stored
from keylane.checker.findings import Findings
from keylane.protocol.backoff import Backoff
from keylane.protocol.message import Message
from keylane.protocol.parked import CRASHED, Failure
from sim.actors.consumers import ConsumerHost
from sim.features.feature import Feature
from sim.features.parks import GROUP, ParkedKeys, expired_in, parked_on
from sim.lateness import outlast_reasons
from sim.swarm import Swarm

if TYPE_CHECKING:
    from sim.features.world import FeatureWorld

ENDLESS = 1_000
"""Tries that no message of a seed reaches."""
PAUSE = Backoff(first_ms=200, max_ms=1_000)
CLOCK_SLACK = 0.9
"""Clocks drift by up to a twentieth."""


@dataclass(slots=True)
class Try:
    """A handler that began with a message."""

    place: tuple[int, int]
    attempt: int
    token: int
    began: int
    """Its instant in the history."""
    began_s: float
    ends: int
    """Processes of consumers that ended before."""
    outcome: str = ""
    """"failed", "handled"; "" if its process ended, or it was cancelled."""
    ended_s: float = 0.0


def text_of(partition_id: int, offset: int) -> str:
    """Why the handler of a message fails: few texts, so that neighbours may have the same one."""
    return f"the handler fails for such messages: {(partition_id + offset // 2) % 3}"


def check_tries(
    tries: Iterable[Try],
    history: Sequence[Event | None],
    *,
    tries_max: int,
    until: int,
    forgotten: Collection[int] = (),
) -> list[str]:
    """
    What is wrong with the tries of messages, in the order in which they began.

    Args:
        until: the instant from which on an operator has dead letters handled again.
        forgotten: tokens of tries of which no disk may know any more: they count, or do not.
    """
    problems: list[str] = []
    by_place: dict[tuple[int, int], list[Try]] = {}
    released = {
        event.token: instant
        for instant, event in enumerate(history)
        if isinstance(event, Served) and event.kind == "release"
    }
    for each in tries:
        before = by_place.setdefault(each.place, [])
        dead_again = each.began >= until
        said = _problem(
            each, before, released, tries_max=tries_max, dead_again=dead_again, forgotten=forgotten
        )
        if said:
            problems.append(f"{each.place[0]}/{each.place[1]}, try {each.attempt}: {said}")
        before.append(each)
    return problems


def cut_off_tokens(history: Iterable[Event | None]) -> set[int]:
    """
    The tokens of owners that have not released, and are followed by another one.

    An owner that loses its lease ends without handing over, as a process that is killed does: what
    it had in hand may be accused.
    """
    owners: dict[int, list[int]] = {}
    released: set[int] = set()
    for event in history:
        if not isinstance(event, Served) or event.group != GROUP:
            continue
        if event.kind == "acquire":
            owners.setdefault(event.partition_id, []).append(event.token)
        elif event.kind == "release":
            released.add(event.token)
    followed = {token for tokens in owners.values() for token in tokens if token < max(tokens)}
    return followed - released


def _problem(
    each: Try,
    before: list[Try],
    released: dict[int, int],
    *,
    tries_max: int,
    dead_again: bool,
    forgotten: Collection[int],
) -> str:
    for other in before:
        if other.outcome == "handled":
            if other.token == each.token:
                return "it was handled under this token"
            known = other.token not in forgotten
            if known and released.get(other.token, each.began) < each.began:
                return "it was handled by an owner that has released"
    if dead_again:
        return ""
    if each.attempt > tries_max:
        return f"{tries_max} are allowed"
    highest = max((other.attempt for other in before), default=0)
    crashes = each.ends - (before[-1].ends if before else 0)
    least = max((other.attempt for other in before if other.token not in forgotten), default=0)
    if each.attempt < least:
        return f"it was tried {least} times"
    if each.attempt > highest + 1 + crashes:
        return f"it was tried only {highest} times, and {crashes} processes have ended"
    last = before[-1] if before else None
    if last is None or last.outcome != "failed" or last.token != each.token:
        return ""
    if each.attempt == last.attempt:
        return "the same owner has tried it so often before"
    pause_s = min(PAUSE.max_ms, PAUSE.first_ms * PAUSE.factor ** (last.attempt - 1)) / 2_000
    if each.began_s < last.ended_s + CLOCK_SLACK * pause_s:
        return f"{each.began_s - last.ended_s:.3f} s after it failed, {pause_s:.3f} s at least"
    return ""


class RetryingHost(ConsumerHost):
    """A consumer whose handlers fail for some messages, as their values say."""

    retries: Retries | None = None

    def _check_poison(self, message: Message) -> None:
        assert self.retries is not None
        if self.retries.fails(message):
            self.retries.note(message, "failed")
            raise ValueError(text_of(message.partition_id, message.offset))

    def _ended(self, message: Message) -> None:
        assert self.retries is not None
        self.retries.note(message, "handled")
        super()._ended(message)

    def end(self, *, machine_down: bool) -> None:
        if self.running and self.retries is not None:
            self.retries.ends += 1
        super().end(machine_down=machine_down)


class Retries(Feature):
    """See the module."""

    faults = frozenset({"broker_crash", "broker_power", "consumer_crash", "resize", "move"})
    consumer_kind = RetryingHost

    def __init__(self, world: FeatureWorld) -> None:
        super().__init__(world)
        self.tries: list[Try] = []
        self.ends = 0
        self._open: dict[tuple[int, int, int], Try] = {}
        self._fails = True
        self._settled = False
        self._redriven = 1 << 62

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        policy = {
            "on_failure": "retry",
            "retry_tries_max": rng.choice((2, 3, 5, ENDLESS)),
            "retry_backoff": PAUSE,
        }
        return replace(
            swarm,
            strict=False,
            keys=rng.choice((1, 2, 6)),
            messages=rng.choice((30, 60)),
            partitions=rng.choice((1, 2, 3)),
            consumer=swarm.consumer | policy,
            manners=swarm.manners | {"fails": 0.0, "bad_keys": 0.0},
        )

    def build(self) -> None:
        self.keys = ParkedKeys(self)
        self.tries_max: int = self.world.swarm.consumer["retry_tries_max"]
        for consumer in self.world.consumers:
            self.adopt(consumer)

    def adopt(self, consumer: ConsumerHost) -> None:
        assert isinstance(consumer, RetryingHost)
        consumer.retries = self
        super().adopt(consumer)

    # ── handlers ──────────────────────────────────────────────────────────────────────────────────
    def on_message(self, message: Message) -> None:
        place = message.partition_id, message.offset
        world = self.world
        begun = Try(
            place,
            message.attempt,
            message.fencing_token,
            len(world.history),
            world.loop.now,
            self.ends,
        )
        self.tries.append(begun)
        self._open[(*place, message.fencing_token)] = begun

    def note(self, message: Message, outcome: str) -> None:
        """Note how the handler of a message ended."""
        tried = self._open[message.partition_id, message.offset, message.fencing_token]
        tried.outcome, tried.ended_s = outcome, self.world.loop.now

    def fails(self, message: Message) -> bool:
        """Whether the handler of a message fails at this try: of one in four always, of one in four
        for a while.
        """
        if not self._fails:
            return False
        drawn = zlib.crc32(message.value)
        return drawn % 4 == 0 or (drawn % 4 == 1 and message.attempt <= 1 + drawn // 4 % 3)

    # ── the story ─────────────────────────────────────────────────────────────────────────────────
    async def work(self) -> None:
        """Once all is healed, look at what became of all messages; then have no handler fail, and
        redrive dead letters.
        """
        await self.look_at_all()
        self._fails = False
        await self.retry_all()
        await self.redrive_all()

    async def look_at_all(self) -> None:
        """Once all is healed and every message is stored, check what became of each: the last one
        has as long as any.
        """
        world = self.world
        while not world.faults.healed or any(each.busy or each.waiting for each in world.producers):
            await asyncio.sleep(0.2)
            self._check_told()
        await asyncio.sleep(world.service.limit_s + 5.0)
        await outlast_reasons(world.consumers, self._late)
        while self._goes_on():
            await asyncio.sleep(0.5)
        self._check_told()
        self.problems += [problem for _, problem in self._unhandled()]

    def _goes_on(self) -> bool:
        """Whether one of the messages that are late was tried a short time ago: below many
        partitions that continue each other the group comes late to the last one.
        """
        late = {place for place, _ in self._unhandled()}
        since_s = self.world.loop.now - self.world.service.limit_s
        return any(each.place in late and each.ended_s > since_s for each in self.tries)

    async def retry_all(self) -> None:
        """Check that nothing waits any more, now that no handler fails."""
        await asyncio.sleep(self.world.service.limit_s)
        await outlast_reasons(self.world.consumers, self._late_retries)
        if self._still_waiting():
            self.problems.append(f"{len(self._still_waiting())} messages still wait for retry")

    async def redrive_all(self) -> None:
        """Redrive dead letters until the world ends."""
        self._redriven = min(self._redriven, len(self.world.history))
        self._settled = True
        while True:
            await self.keys.change_some(chance=1.0)
            await asyncio.sleep(0.5)

    def _still_waiting(self) -> set[tuple[int, int]]:
        """The places of what waits for retry, and should not."""
        return set(self._waiting()[1])

    def _is_gone(self, place: tuple[int, int]) -> bool:
        """Whether no broker has this message any more, or no disk tells that it waited."""
        return False

    def _waiting(self) -> tuple[set[tuple[int, int]], dict[tuple[int, int], int]]:
        """Places of dead letters, and of what waits for retry, with the partition at which it does:
        a child may have it.
        """
        dead: set[tuple[int, int]] = set()
        retrying: dict[tuple[int, int], int] = {}
        expired = expired_in(self.world)
        for broker in self.world.brokers:
            for number, parked in parked_on(broker.store).items() if broker.store else ():
                if parked.frozen or number in expired:
                    continue
                for row in list_parked_keys(parked, 0):
                    rows = list_parked_offsets(parked, row.key, count=1 << 30).rows
                    places = [
                        (source, offset)
                        for source, start, end in rows
                        for offset in range(start, end)
                    ]
                    if row.key is None:
                        dead.update(places)
                    else:
                        retrying |= dict.fromkeys(places, number)
        return dead, retrying

    def _check_told(self) -> None:
        """Each message that is set aside has its own failure, and its next try while the owner that
        said it has the fence.
        """
        tried: dict[tuple[int, int], Try] = {}
        for each in self.tries:
            if each.place not in tried or each.token >= tried[each.place].token:
                tried[each.place] = each
        for broker in self.world.brokers:
            if not (broker.running and broker.store):
                continue
            for number, parked in parked_on(broker.store).items():
                fence = broker.store.state.partition(number).groups[GROUP].lock.fence
                for key, known in parked.items():
                    if not isinstance(key, bytes) and not parked.frozen:
                        for source, start, end, mark in known.rows_with_marks((0, 0), 1 << 30):
                            for offset in range(start, end):
                                last = tried.get((source, offset)) if source == number else None
                                self._check_mark((source, offset), parked.failure(mark))
                                self._check_next(
                                    (source, offset), key, mark.retry_at_ms, last, fence
                                )

    def _check_mark(self, place: tuple[int, int], failure: Failure | None) -> None:
        if failure is None or (failure.kind != CRASHED and failure.text != text_of(*place)):
            self.problems.append(f"{place[0]}/{place[1]} is told to have failed with {failure}")

    def _check_next(
        self,
        place: tuple[int, int],
        key: int | None,
        retry_at_ms: int,
        last: Try | None,
        fence: int,
    ) -> None:
        """Of a message of the partition itself, whose tries all have the partition's tokens."""
        if not key or last is None:
            return
        said = f"{place[0]}/{place[1]}, tried {key} times, has its next try at {retry_at_ms}"
        if last.token < fence and retry_at_ms:
            self.problems.append(f"{said}, as an owner said that is gone")
        if (last.token, last.attempt, last.outcome) == (fence, key, "failed") and not retry_at_ms:
            self.problems.append(f"{said}, though its owner has said when it is")

    def _late(self) -> dict[tuple[str, int], set[int]]:
        return self._by_partition(place for place, _ in self._unhandled())

    def _late_retries(self) -> dict[tuple[str, int], set[int]]:
        return self._by_partition(self._still_waiting())

    def _by_partition(self, places: Iterable[tuple[int, int]]) -> dict[tuple[str, int], set[int]]:
        """Late messages at the partition that has them; a child's pulls bring none of a parent's,
        so that these are before all.
        """
        late: dict[tuple[str, int], set[int]] = {}
        retrying = self._waiting()[1]
        for source, offset in places:
            number = retrying.get((source, offset), source)
            late.setdefault((GROUP, number), set()).add(offset if number == source else -1)
        return late

    def _unhandled(self) -> Iterator[tuple[tuple[int, int], str]]:
        """Each stored message is handled, or a dead letter for a reason, or waits; only those that
        always fail wait.
        """
        dead, retrying = self._waiting()
        cut_off = cut_off_tokens(self.world.history)
        tried: dict[tuple[int, int], list[Try]] = {}
        for each in self.tries:
            tried.setdefault(each.place, []).append(each)
        for event in self.world.history:
            if not isinstance(event, Settled) or event.outcome != "stored":
                continue
            place = event.partition_id, event.offset
            tries = tried.get(place, [])
            if any(each.outcome == "handled" for each in tries) or self._is_gone(place):
                continue
            failed = max((each.attempt for each in tries if each.outcome == "failed"), default=0)
            unfinished = any(not each.outcome for each in tries)
            # An owner that is cut off may have had it in hand, with no handler that had begun.
            last_token = max((each.token for each in tries), default=0)
            cut_short = unfinished or self.ends or any(each >= last_token for each in cut_off)
            where = f"{place[0]}/{place[1]}, which failed {failed} times,"
            if place in dead:
                if failed < self.tries_max and not cut_short:
                    yield place, f"{where} is a dead letter"
            elif place not in retrying:
                yield place, f"{where} is neither handled nor set aside"
            elif zlib.crc32(event.value) % 4 or self.tries_max < ENDLESS:
                yield place, f"{where} still waits for retry"

    @property
    def drained(self) -> bool:
        return self._settled and self.keys.none_left

    def seen(self, view: list[Any]) -> list[Any]:
        """Without keys: under best_tried handlers keep no order."""
        return [
            event._replace(key=b"")
            if isinstance(event, Sent | Stored)
            else event._replace(reordered=False)
            if isinstance(event, Settled)
            else event
            for event in view
        ]

    def check(self, findings: Findings, hosted: dict[int, HostedPartition]) -> None:
        self.problems += check_tries(
            self.tries,
            self.world.history,
            tries_max=self.tries_max,
            until=self._redriven,
            forgotten=self._forgotten(),
        )

    def _forgotten(self) -> Collection[int]:
        """The tokens of tries of which no disk may know any more."""
        return ()
