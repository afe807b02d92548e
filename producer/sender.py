"""Messages of one subject on their way to executors: the route table, and what happens while there is none.

Invariants
    The messages of one key reach one executor at a time, in the order they were sent; when their partition is
    left, the older ones go first and newer ones wait in the hold: until the newer route is here, and until the
    partition that is left has answered, or refused, all it was sent.
    What is held has no executor in the table: whatever fills the table hands over the hold, oldest first.

    send() ─▶ table[logical partition] ─▶ executor          hold: a batch of messages without a partition yet
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterable
from functools import partial

from ..protocol.clock import Clock
from ..protocol.errors import KeylaneError, NoPartitionError, Retry
from ..protocol.limits import LOGICAL_PARTITIONS, PULL_WAIT_MS_MAX
from ..protocol.routing import (
    OrderStrategy,
    Partition,
    Route,
    logical_partition,
    route_table,
)
from ..protocol.text import counted
from ..rpc.client import BrokerClient, MetaClient
from .executor import Executor, MessageGroup
from .executor_state import ExecutorEvent
from .failure import Step
from .halts import Halts
from .identity import Identity
from .outgoing_batch import REORDERED, OutgoingBatch
from .send_budget import SendBudget
from .send_future import SendFuture
from .settings import ProducerSettings
from .waiting import WaitReport

log = logging.getLogger("keylane.producer")
CLIENT_TYPE = "producer"
URGENT_WAIT_MS = 500
EXPIRE_MS_MIN, EXPIRE_MS_MAX = 10, 1_000
EXPIRE_SHARE = 10
"""Messages are given up at most this part of their time-out late."""
NO_ROUTE = "the metaserver has not told the route yet"
NO_PARTITION = "the route has no open partition that takes them"
CLOSED = "the producer was closed before this message was acked"


class SubjectSender:
    """The executors of one subject and the tables that lead to them, None where messages are held."""

    def __init__(
        self,
        subject: str,
        *,
        strategy: OrderStrategy | None,
        meta: MetaClient,
        broker_at: Callable[[str], BrokerClient],
        identity: Identity,
        settings: ProducerSettings,
        clock: Clock,
        rng: random.Random,
        budget: SendBudget,
        on_dead: Callable[[SubjectSender], None],
    ) -> None:
        self.subject = subject
        self.table: list[Executor | None] = [None] * LOGICAL_PARTITIONS
        """Where keyed messages go, by logical partition."""
        self.keyless = self.table
        """Where messages without a key go, by a random number: past what does not answer."""
        self.careful = False
        """True while some messages go elsewhere than home, or a key is halted: `check` each keyed message."""
        self._asked = strategy
        self._meta = meta
        self._broker_at = broker_at
        self._identity = identity
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._budget = budget
        self._on_dead = on_dead
        self._loop = asyncio.get_running_loop()
        self._route: Route | None = None
        self._outdated: int | None = None
        """The version of the route that was followed when the metaserver had only older ones; told once."""
        self._executors: dict[int, Executor] = {}
        self._epochs = itertools.count()
        self._hold: list[OutgoingBatch] = [OutgoingBatch(self._loop.create_future())]
        self._held_report = WaitReport()
        self._held_for = NO_ROUTE
        """Why messages are held, for people."""
        self._halts = Halts(subject, clock, budget)
        self._open: set[int] = set()
        self._places: list[int] = []
        self._home: list[Executor | None] = [None] * LOGICAL_PARTITIONS
        self._away: dict[int, Executor] = {}
        """Which executor stands in for a partition whose messages went elsewhere, until it answers again."""
        self._refresh = asyncio.Event()
        self._closing = False
        self._expiring: asyncio.TimerHandle | None = None
        self._expire_ms = EXPIRE_MS_MAX
        """How often it is looked for messages whose time is over."""
        self._task = asyncio.create_task(self._follow_route(), name=f"route {subject}")

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────
    def hold(
        self, key: bytes, value: bytes, packed_properties: bytes, sent_at_ns: int, timeout_ms: int
    ) -> SendFuture:
        """Keep a message that has no executor now.  Raises KeyHaltedError."""
        if key:
            self._halts.check(key)
        batch = self._hold[-1]
        if self._full(batch, len(value)):
            batch = OutgoingBatch(self._loop.create_future())
            self._hold.append(batch)
        size = batch.size
        index = batch.add(key, value, packed_properties, sent_at_ns)
        self._budget.enter(1, batch.size - size)
        if timeout_ms:
            self.annotate(batch, index, reordered=False, timeout_ms=timeout_ms)
        return SendFuture(batch, index)

    def check(self, executor: Executor, key: bytes, place: int) -> bool:
        """
        True if a message of logical partition `place` is reordered because it goes to `executor`.

        Raises:
            KeyHaltedError: its key is halted; nothing was queued.
        """
        if not key:
            return False
        self._halts.check(key)
        return executor is not self._home[place]

    def annotate(
        self, batch: OutgoingBatch, index: int, *, reordered: bool, timeout_ms: int
    ) -> None:
        """Mark a message that was just queued, or give it up after so long (0: never)."""
        if reordered:
            batch.mark(index, REORDERED)
        if timeout_ms:
            batch.set_deadline(index, self._clock.boot_ms() + timeout_ms, timeout_ms)
            self._expire_often(timeout_ms)

    def _expire_often(self, timeout_ms: int) -> None:
        """See that messages with such a time-out are given up in time."""
        every_ms = min(EXPIRE_MS_MAX, max(EXPIRE_MS_MIN, timeout_ms // EXPIRE_SHARE))
        if self._expiring is None or every_ms < self._expire_ms:
            self._expire_ms = every_ms
            if self._expiring is not None:
                self._expiring.cancel()
            self._expiring = self._loop.call_later(every_ms / 1000, self._expire)

    def _expire(self) -> None:
        """Give up what is not acked in its time, and halt its keys."""
        self._expiring = self._loop.call_later(self._expire_ms / 1000, self._expire)
        executors = self.executors
        waiting = [(batch, one.waiting_for) for one in executors for batch in one.batches]
        waiting += [(batch, self._held_for) for batch in self._hold]
        if not self._halts.expire(waiting):
            return
        withdraw = self._halts.withdraw
        held = [withdraw(one, waits_for=self._held_for) for one in self._hold if len(one)]
        self._hold = [one for one in held if one is not None]
        self._hold.append(OutgoingBatch(self._loop.create_future()))
        self.careful = True
        for executor in executors:
            executor.sift(partial(withdraw, waits_for=executor.waiting_for))

    def resume(self, key: bytes) -> None:
        """Let messages of a halted key be sent again."""
        self._halts.resume(key)
        self._refill()

    @property
    def executors(self) -> list[Executor]:
        """One for each message group, by partition id."""
        return [self._executors[key] for key in sorted(self._executors)]

    @property
    def waiting(self) -> dict[str, str]:
        """Partitions whose messages wait, and for what; under the subject's name what has no partition now."""
        found = {
            one.group.partition_name: one.waiting_for for one in self.executors if one.waiting_for
        }
        if any(map(len, self._hold)):
            found[self.subject] = self._held_for
        return found

    def roll(self) -> None:
        """Let everything gathered so far go."""
        for executor in self._executors.values():
            executor.roll()

    # ── the route ────────────────────────────────────────────────────────────────────────────────────
    async def _follow_route(self) -> None:
        try:
            await self._follow_routes()
        except asyncio.CancelledError:
            unsent = self._unsettled()
            if unsent and not self._closing:
                log.warning(
                    "a producer of %s was never closed: %s not acked and given up; use: "
                    "async with Producer(...), or await producer.close()",
                    self.subject, counted(unsent, "message was", "messages were"),
                )  # fmt: skip
            raise

    def _unsettled(self) -> int:
        waiting = [*self._hold, *(one for executor in self.executors for one in executor.batches)]
        return sum(map(len, waiting))

    async def _follow_routes(self) -> None:
        attempt = 0
        while True:
            why = NO_PARTITION
            try:
                if self._apply(await self._ask()):
                    await self._seek_brokers()
                    attempt = 0
                    self._tell_of_hold(why)
                    continue
                why = "the metaserver's route is older than the one followed"
            except KeylaneError as error:
                if error.retry is Retry.NEVER and self._route is None:
                    self._die(error)
                    return
                log.info("route of %s: %s", self.subject, error.message)
                why = error.message
            self._tell_of_hold(why)
            attempt += 1
            await asyncio.sleep(self._settings.backoff.wait_ms(attempt, self._rng) / 1000)

    def _tell_of_hold(self, why: str) -> None:
        """Tell people now and then what messages wait for that have no partition."""
        now_ms = self._clock.boot_ms()
        held = sum(map(len, self._hold))
        self._held_for = why if held else NO_PARTITION
        if not held:
            took_ms = self._held_report.over(now_ms)
            if took_ms is not None:
                log.warning("%s: messages are held no longer, after %.0f s", self.subject, took_ms / 1000)  # fmt: skip
        elif self._held_report.waits(now_ms):
            oldest_ms = self._clock.wall_ms() - self._hold[0].times[0] // 1_000_000
            log.warning(
                "%s: %s held, the oldest for %.0f s: %s",
                self.subject, counted(held, "message is", "messages are"), max(0, oldest_ms) / 1000, why,
            )  # fmt: skip

    async def _ask(self) -> Route:
        """
        A newer route when there is one, else the same after PULL_WAIT_MS_MAX.

        While a broker is missing the call is short, so that whatever else fails meanwhile waits for a short call only.
        """
        known = self._route
        ask = partial(
            self._meta.route,
            self.subject,
            known_version=-1 if known is None else known.version,
            order_strategy=self._asked,
        )
        urgent = self._refresh.is_set() or self._lacks_a_broker()
        self._refresh.clear()
        if known is None or urgent:
            return await ask(wait_ms=URGENT_WAIT_MS)
        call = asyncio.create_task(ask(wait_ms=PULL_WAIT_MS_MAX))
        refresh = asyncio.create_task(self._refresh.wait())
        try:
            await asyncio.wait((call, refresh), return_when=asyncio.FIRST_COMPLETED)
            return await call if call.done() else known
        finally:
            call.cancel()
            refresh.cancel()
            await asyncio.gather(call, refresh, return_exceptions=True)

    def _lacks_a_broker(self) -> bool:
        """True while some range has no partition to go to, or the broker of a partition fails."""
        return None in self._home or any(
            not one.state.available for one in self._executors.values()
        )

    def _die(self, error: KeylaneError) -> None:
        """The metaserver will never give a route: everything held is given up."""
        self._on_dead(self)
        if self._expiring is not None:
            self._expiring.cancel()
        for batch in self._hold:
            if len(batch):
                self._budget.give_up(batch, error)
        self._hold = [OutgoingBatch(self._loop.create_future())]

    def _apply(self, route: Route) -> bool:
        """Follow a route; False if it is older than the one followed, which changes nothing."""
        if self._route is not None and route.version < self._route.version:
            self._tell_of_older(route)
            return False
        self._route = route
        self._open = {one.partition_id for one in route.open_partitions()}
        self._places = [one.partition_id for one in route_table(route)]
        for partition in route.open_partitions():
            if partition.partition_id not in self._executors:
                self._executors[partition.partition_id] = self._new_executor(partition, route)
        self._follow_brokers(route.partitions)
        listed = {one.partition_id for one in route.partitions}
        for partition_id, executor in list(self._executors.items()):
            if partition_id in self._open:
                executor.heard(ExecutorEvent.OPEN_IN_ROUTE)
                continue
            closed = partition_id in listed
            executor.heard(ExecutorEvent.CLOSED_IN_ROUTE if closed else ExecutorEvent.NOT_IN_ROUTE)
            if executor.idle:
                self._retire(executor)
        self._refill()
        return True

    def _tell_of_older(self, route: Route) -> None:
        assert self._route is not None
        known = self._route.version
        if self._outdated != known:
            self._outdated = known
            log.warning(
                "route of %s: the metaserver's is version %d, older than %d, which is followed here: its database "
                "was restored from a copy, or rebuilt. Until it has a newer one nothing of it is followed; a producer "
                "that is started again takes what the metaserver has",
                self.subject, route.version, known,
            )  # fmt: skip

    async def _seek_brokers(self) -> None:
        """
        Find the brokers that do not answer and have no partition in the route any more, wherever they are now.

        Only they know whether a batch that was sent there is stored.
        """
        if any(one.state.gone and not one.state.available for one in self._executors.values()):
            await self.ask_history()

    async def ask_history(self) -> set[str]:
        """
        Hear which partitions are lost, and where the brokers of all are now.

        Returns:
            The broker groups that are silent: what they have is told when they are back.

        Raises:
            KeylaneError
        """
        history = await self._meta.history(self.subject)
        for one in history.partitions:
            executor = self._executors.get(one.partition.partition_id)
            if executor is not None and one.lost:
                executor.heard(ExecutorEvent.LOSS_ACCEPTED)
        self._follow_brokers(one.partition for one in history.partitions)
        return {
            one.partition.broker_group for one in history.partitions if not one.partition.address
        }

    def _follow_brokers(self, partitions: Iterable[Partition]) -> None:
        """Executors go where their broker groups are now; also those of partitions that are open no more."""
        addresses = {one.broker_group: one.address for one in partitions if one.address}
        for executor in self._executors.values():
            address = addresses.get(executor.partition.broker_group)
            if address is not None and address != executor.partition.address:
                executor.moved(address, self._broker_at(address))

    def _retire(self, executor: Executor) -> None:
        """Close the executor of a partition that is open no more; all it had is answered, or in the hold."""
        if self._executors.pop(executor.partition.partition_id, None) is not None:
            self._loop.create_task(executor.close())

    def emptied(self, executor: Executor) -> None:
        """A partition that is open no more has answered everything: newer messages of its range may go."""
        self._retire(executor)
        self._refill()

    def _new_executor(self, partition: Partition, route: Route) -> Executor:
        address = partition.address
        group = MessageGroup(CLIENT_TYPE, self.subject, partition.name, partition.broker_group)
        return Executor(
            group,
            partition,
            None if address is None else self._broker_at(address),
            self,
            may_leave=route.may_leave,
            identity=self._identity,
            settings=self._settings,
            clock=self._clock,
            rng=self._rng,
            budget=self._budget,
            epochs=self._epochs,
        )

    # ── leaving a partition ──────────────────────────────────────────────────────────────────────────
    def availability_changed(self) -> None:
        """Ask for a newer route, and let messages without a key pass by what does not answer."""
        self._refresh.set()
        self._refill()

    def _refill(self) -> None:
        self._fill_table()
        self._drain_hold()
        self._pass_over()

    def _fill_table(self) -> None:
        """
        Where each message goes now.  None, into the hold: its partition is sealed or has refused it, and the newer
        route is not here, or the partition before it still has messages.  Ranges whose messages went elsewhere
        (BEST_TRIED) follow them there, until their own partition answers again.
        """
        route = self._route
        if route is None:
            self.careful = bool(self._halts.keys)
            return
        usable = {key: one for key, one in self._executors.items() if one.state.in_use}
        self._home = [usable.get(partition_id) for partition_id in self._places]
        spare = self._spare()
        self._renew_stand_ins(usable, spare)
        self.careful = bool(self._away or self._halts.keys)
        taker: dict[int, Executor | None] = {}
        for partition_id, one in usable.items():
            there = self._away.get(partition_id, one)
            taker[partition_id] = None if one.state.refuses or there.state.refuses else there
        table = [taker.get(partition_id) for partition_id in self._places]
        for executor in self._executors.values():
            if executor.state.left:
                left = executor.partition
                width = left.range_end - left.range_start
                table[left.range_start : left.range_end] = [None] * width
        self.table = self.keyless = table
        if spare and any(one is None or not one.state.available for one in taker.values()):
            self.keyless = [
                one if one is not None and one.state.available else spare[place % len(spare)]
                for place, one in enumerate(table)
            ]

    def _renew_stand_ins(self, usable: dict[int, Executor], spare: list[Executor]) -> None:
        for partition_id, there in list(self._away.items()):
            home = usable.get(partition_id)
            if home is None or home.state.available:
                del self._away[partition_id]
            elif (
                not there.state.in_use
                or there.state.left
                or (there.idle and not there.state.available)
            ):
                # Nothing older of this range waits there.
                del self._away[partition_id]
                if spare:
                    self._away[partition_id] = self._rng.choice(spare)

    def _pass_over(self) -> None:
        """Messages without a key do not wait for a partition that does not answer, unless they were sent there."""
        spare = self._spare()
        if not spare:
            return

        def sieve(batch: OutgoingBatch) -> OutgoingBatch | None:
            if not batch.keyless:
                return batch
            taken, rest = batch.divided(lambda index: not batch.keys[index])
            self._budget.replaced(batch, taken, rest)
            if taken is not None:
                self._rng.choice(spare).take_over([taken])
            return rest

        for executor in self.executors:
            if not executor.state.available:
                executor.sift(sieve)

    def _spare(self) -> list[Executor]:
        """The executors that may take messages of others, by partition id."""
        return [one for one in self.executors if one.state.spare]

    def has_spare(self, executor: Executor) -> bool:
        """True if batches of `executor` may go elsewhere under BEST_TRIED."""
        return bool(self._others(executor))

    def _others(self, executor: Executor) -> list[Executor]:
        """Where batches of `executor` may go under BEST_TRIED."""
        return [one for one in self._spare() if one is not executor]

    def take_back(self, executor: Executor, batches: list[OutgoingBatch], step: Step) -> None:
        """Hand batches that left their partition to another executor, or hold them until there is a newer route."""
        if step is Step.ELSEWHERE:
            there = self._rng.choice(self._others(executor))
            for partition_id, stand_in in self._away.items():
                if stand_in is executor:
                    self._away[partition_id] = there
            self._away[executor.partition.partition_id] = there
            for batch in batches:
                batch.mark_reordered()
            there.take_over(batches)
            self._refill()
            return
        # Newer messages of its range wait behind these until a newer route is here.
        self._hold = [*batches, *self._hold]
        self._refill()
        self._refresh.set()

    def _drain_hold(self) -> None:
        """Hand the held messages to their executors, oldest first."""
        held, self._hold = self._hold, [OutgoingBatch(self._loop.create_future())]
        adopting: dict[int, Executor] = {}
        still_held: OutgoingBatch | None = None
        for batch in held:
            self._budget.leave(batch)
            for index, key in enumerate(batch.keys):
                if batch.expired and batch.settled(index):
                    continue
                size = len(batch.values[index])
                place = logical_partition(key) if key else self._rng.getrandbits(10)
                executor = (self.table if key else self.keyless)[place]
                if executor is None:
                    still_held = self._hold_again(still_held, batch, index)
                    continue
                if id(executor) not in adopting or self._full(executor.open, size):
                    adopting[id(executor)] = executor
                    executor.roll()
                executor.open.adopt(batch, index)
                if key and executor is not self._home[place]:
                    executor.open.mark(len(executor.open) - 1, REORDERED)
        for executor in adopting.values():
            executor.roll()

    def _hold_again(
        self, last: OutgoingBatch | None, batch: OutgoingBatch, index: int
    ) -> OutgoingBatch:
        """Keep a message held, in a batch of its own kind; returns that batch."""
        if last is None or self._full(last, len(batch.values[index])):
            last = OutgoingBatch(self._loop.create_future())
            self._hold.insert(len(self._hold) - 1, last)
        size = last.size
        last.adopt(batch, index)
        self._budget.enter(1, last.size - size)
        return last

    def _full(self, batch: OutgoingBatch, value_bytes: int) -> bool:
        """True if a message with such a value does not belong into `batch` any more."""
        settings = self._settings
        return (
            batch.size >= settings.batch_bytes
            or len(batch) >= settings.batch_count
            or (len(batch) > 0 and value_bytes > settings.large_bytes)
        )

    async def close(self) -> None:
        """Stop everything; what is not settled is given up."""
        self._closing = True
        if self._expiring is not None:
            self._expiring.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for executor in self.executors:
            for batch in await executor.close():
                self._budget.give_up(batch, NoPartitionError(CLOSED))
        for batch in self._hold:
            if len(batch):
                self._budget.give_up(batch, NoPartitionError(CLOSED))
