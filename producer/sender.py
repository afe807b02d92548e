"""Hands the messages of a subject to executors by its route, and holds messages that have no
partition now.

    send() ─▶ table[logical partition] ─▶ executor
    held: batches of messages without a partition

Invariants
    The messages of a key are in one executor at a time, in the order of their `send` calls. When
    messages leave a partition, older ones are sent first. Newer ones are held until there is a
    newer route, and until the old partition has answered or refused every message that was sent to
    it. The table has None where messages are held; when an entry is filled, its held messages are
    released, the oldest first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeGuard

from ..protocol import endpoints
from ..protocol.clock import Clock
from ..protocol.errors import (
    ClosedError,
    Fate,
    KeylaneError,
    Reason,
    RetryRule,
    SubjectDeletedError,
)
from ..protocol.limits import LOGICAL_PARTITIONS, MESSAGE_BYTES_MAX, PULL_WAIT_MS_MAX
from ..protocol.log_filter import LogFilter
from ..protocol.routing import OrderStrategy, Partition, Route, logical_partition, route_table
from ..protocol.text import counted
from ..rpc.client import BrokerClient, MetaClient
from ..rpc.race import Race, start_task
from .executor import Executor
from .executor_state import ExecutorEvent, MessageGroup
from .failure import Step
from .flight import Turn
from .halts import Halts
from .held import HeldMessages
from .identity import Identity
from .outgoing_batch import REORDERED, OutgoingBatch
from .placing import Place, QueueStarts
from .send_budget import SendBudget
from .send_future import BatchFuture, SendFuture
from .settings import ProducerSettings
from .trying.tries import failure_of, keep_trying
from .waiting import NO_PARTITION, OLDER_ROUTE, WaitCause, route_cause

log = logging.getLogger("keylane.producer")
CLIENT_TYPE = "producer"
_OLDER = "older"
"""The key, among the troubles of a sender, for routes that are older than the followed one."""
URGENT_WAIT_MS = 500
EXPIRE_MS_MIN, EXPIRE_MS_MAX = 10, 1_000
NOWHERE: list[Executor | None] = [None] * LOGICAL_PARTITIONS
EXPIRE_SHARE = 10
"""The divisor for late time-outs: a message is given up late by at most its time-out divided by
this number.
"""
CLOSED = "the producer was closed before this message was acked"
CLOSED_HINT = (
    "Send it again, unless its fate is unknown: it may be stored. Await `send` before the "
    "producer closes."
)


class SubjectSender:
    """The executors of a subject, and the tables in which its messages find them."""

    def __init__(
        self,
        subject: str,
        *,
        order_strategy: OrderStrategy | None,
        meta: MetaClient,
        broker_at: Callable[[str], BrokerClient],
        identity: Identity,
        settings: ProducerSettings,
        clock: Clock,
        rng: random.Random,
        budget: SendBudget,
        turn: Turn,
        on_dead: Callable[[SubjectSender], None],
    ) -> None:
        self.subject = subject
        self.table: list[Executor | None] = [None] * LOGICAL_PARTITIONS
        """The executor of messages with a key, by logical partition; None where they are held."""
        self.keyless = self.table
        """The table for messages without a key, in which partitions that do not answer are replaced
        by others.
        """
        self.message_bytes_max = MESSAGE_BYTES_MAX
        """The limit of the followed route: the bytes of key, value and properties of one message.
        """
        self.plain = self.table
        """The table for plain messages in `send`; an entry is None also where `send` has to check
        further, and all are None while `careful`.
        """
        self._careful = False
        self._order_strategy = order_strategy
        self._meta = meta
        self._broker_at = broker_at
        self._identity = identity
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._budget = budget
        self._turn = turn
        self._on_dead = on_dead
        self._route: Route | None = None
        self._troubles = LogFilter()
        self._executors: dict[int, Executor] = {}
        self._epochs = itertools.count()
        self.held = HeldMessages(
            subject, settings=settings, clock=clock, budget=budget, said=self._said
        )
        self._halts = Halts(subject, clock, budget)
        self.queue_starts = QueueStarts(subject)
        self._partition_ids: list[int] = []
        self._home_table: list[Executor | None] = [None] * LOGICAL_PARTITIONS
        self._away: dict[int, Executor] = {}
        """The executor that takes the messages of a partition until its own broker answers again,
        by partition id.
        """
        self._refresh = asyncio.Event()
        self._routed = asyncio.Event()
        self._refusal: KeylaneError | None = None
        self._closing = False
        self._expiring: asyncio.TimerHandle | None = None
        self._expire_ms = EXPIRE_MS_MAX
        """The interval, in milliseconds, between two searches for overdue messages."""
        self._pauses = settings.backoff.pauses(rng)
        trying = keep_trying(self._follow, self._failed, self._pauses, self._failure)
        self._task = start_task(trying, name=f"route {subject}")
        # This is not done in the task, because a task that is cancelled before its first step never
        # runs.
        self._task.add_done_callback(self._ended)

    @property
    def careful(self) -> bool:
        """Return True while messages go to other partitions than their own, or a key is halted;
        `send` then calls `check`.
        """
        return self._careful

    @careful.setter
    def careful(self, careful: bool) -> None:
        self._careful = careful
        self._choose_plain()

    def _choose_plain(self) -> None:
        """Make `send` check each message while some messages do not go to their own logical
        partition's executor.
        """
        self.plain = NOWHERE if self._careful or self.keyless is not self.table else self.table

    # ── sending ───────────────────────────────────────────────────────────────────────────────────
    def hold(
        self,
        key: bytes,
        value: bytes,
        packed_properties: bytes,
        sent_at_ns: int,
        timeout_ms: int,
        place: Place | None,
    ) -> SendFuture:
        """Hold a message that has no partition now; `place` is the place that its sender chose.
        Raises KeyHaltedError.
        """
        if key:
            self._halts.check(key)
        batch, index = self.held.add(key, value, packed_properties, sent_at_ns)
        if place is not None:
            batch.set_place(index, place)
        if timeout_ms:
            self.annotate(batch, index, reordered=False, timeout_ms=timeout_ms)
        return BatchFuture(batch, index)

    async def routed(self) -> None:
        """
        Wait for the first route.

        Raises:
            KeylaneError: the metaserver refuses the route.
        """
        await self._routed.wait()
        self.check_alive()

    def check_alive(self) -> None:
        """Raise the KeylaneError that explains why nothing is sent any more, if there is one."""
        if self._refusal is not None:
            raise self._refusal.copy(Fate.NOT_DONE)

    def check(self, executor: Executor, key: bytes, logical: int) -> bool:
        """
        Return True if a message of this logical partition is reordered because it goes to
        `executor`.

        Raises:
            KeyHaltedError: the key is halted; nothing was queued.
        """
        if not key:
            return False
        self._halts.check(key)
        return executor is not self._home_table[logical]

    def annotate(
        self, batch: OutgoingBatch, index: int, *, reordered: bool, timeout_ms: int
    ) -> None:
        """Mark a message that was just queued as reordered, or set its time-out (0: none)."""
        if reordered:
            batch.mark(index, REORDERED)
        if timeout_ms:
            batch.set_deadline(index, self._clock.boot_ms() + timeout_ms, timeout_ms)
            self._expire_often(timeout_ms)

    def _expire_often(self, timeout_ms: int) -> None:
        """Search for overdue messages often enough for this time-out."""
        every_ms = min(EXPIRE_MS_MAX, max(EXPIRE_MS_MIN, timeout_ms // EXPIRE_SHARE))
        if self._expiring is None or every_ms < self._expire_ms:
            self._expire_ms = every_ms
            if self._expiring is not None:
                self._expiring.cancel()
            self._expiring = asyncio.get_running_loop().call_later(every_ms / 1000, self._expire)

    def _expire(self) -> None:
        """Give up overdue messages, and halt their keys."""
        self._expiring = asyncio.get_running_loop().call_later(self._expire_ms / 1000, self._expire)
        executors = self.executors
        waiting = [
            (batch, executor.waiting_for) for executor in executors for batch in executor.batches
        ]
        waiting += [(batch, self.held.cause.reason) for batch in self.held.batches]
        if not self._halts.expire(waiting):
            return
        withdraw = self._halts.withdraw
        waits_for = self.held.cause.reason
        held = [withdraw(batch, waits_for=waits_for) for batch in self.held.batches if len(batch)]
        self.held.replace(batch for batch in held if batch is not None)
        self.careful = True
        for executor in executors:
            executor.sift(partial(withdraw, waits_for=executor.waiting_for))

    def resume(self, key: bytes) -> None:
        """Allow messages of a halted key to be sent again."""
        self._halts.resume(key)
        self._refill()

    @property
    def executors(self) -> list[Executor]:
        """Return the executors, sorted by partition id."""
        return [self._executors[key] for key in sorted(self._executors)]

    def roll(self) -> None:
        """Close the open batches, so that they are sent."""
        for executor in self._executors.values():
            executor.roll()

    # ── the route ─────────────────────────────────────────────────────────────────────────────────
    def _ended(self, _task: asyncio.Task[None]) -> None:
        """Log how many messages are lost if the event loop ended before the producer was closed."""
        batches = [batch for executor in self.executors for batch in executor.batches]
        unsent = len(self.held) + sum(map(len, batches))
        if unsent and not self._closing:
            log.warning(
                "a producer of %s was never closed: %s not acked and given up; use: "
                "async with Producer(...), or await producer.close()",
                self.subject,
                counted(unsent, "message was", "messages were"),
            )

    async def _follow(self) -> bool:
        """Follow the next route, and return True once all messages are given up because of a
        refusal.
        """
        if self._refusal is not None:
            await self._die(self._refusal)
            return True
        if self._apply(await self._ask()):
            await self._seek_brokers()
            if failures := self._troubles.over(self._clock.boot_ms(), None, _OLDER):
                log.info("route of %s is updated again, after %s", self.subject, failures)
            self._pauses.reset()
            self.held.report(NO_PARTITION)
        else:
            self.held.report(OLDER_ROUTE)
            await asyncio.sleep(self._pauses.next_ms() / 1000)
        return False

    def _failure(self, raised: Exception) -> KeylaneError:
        """Return the error that a try raised; an unforeseen exception is logged, and becomes an
        InternalError.
        """
        return failure_of(raised, f"route of {self.subject}", self._troubles, self._clock.boot_ms())

    async def _failed(self, raised: Exception) -> bool:
        """Note why no newer route is followed, and return True if none ever will be, which the next
        try acts on.
        """
        error = self._failure(raised)
        if error is raised:
            if error.retry is RetryRule.NEVER and (self._route is None or _is_final(error)):
                self._refusal = error
                return True
            if line := self._troubles.met(error.message, self._clock.boot_ms()):
                log.info("route of %s: %s", self.subject, line)
        self.held.report(route_cause(error))
        return False

    async def _ask(self) -> Route:
        """
        Wait for a newer route, at most PULL_WAIT_MS_MAX, and return the known route if there is
        none.

        While a broker is missing the calls are short, so that a new call soon follows the next
        failure.
        """
        known = self._route
        urgent = self._refresh.is_set() or self._lacks_a_broker()
        self._refresh.clear()
        if known is None:
            return await self._meta.route_to_send(
                self.subject, wait_ms=URGENT_WAIT_MS, order_strategy=self._order_strategy
            )
        ask = partial(
            self._meta.route,
            self.subject,
            known_version=known.version,
            order_strategy=self._order_strategy,
            subject_id=known.subject_id,
        )
        if urgent:
            return await ask(wait_ms=URGENT_WAIT_MS)
        async with Race() as race:
            call = race.start(ask(wait_ms=PULL_WAIT_MS_MAX))
            race.start(self._refresh.wait())
            await race.first()
            return call.result() if call.done() else known

    def _said(self) -> WaitCause:
        """Return the cause reported by the broker of an open partition that takes nothing;
        NO_PARTITION if there is none.
        """
        refusing = (each for each in self.executors if each.state.refuses and not each.state.left)
        return next((each.cause for each in refusing if each.waiting_for), NO_PARTITION)

    def _lacks_a_broker(self) -> bool:
        """Return True while some range has no partition, or the broker of a partition fails."""
        return None in self._home_table or not all(map(_answers, self._executors.values()))

    async def _die(self, error: KeylaneError) -> None:
        self._on_dead(self)
        await self._give_up_all(error)
        self._executors.clear()

    def _apply(self, route: Route) -> bool:
        """Follow a route, and return False if it is older than the followed one and therefore
        ignored.
        """
        if self._route is not None and route.version < self._route.version:
            text = (
                f"the metaserver's is version {route.version}, older than "
                f"{self._route.version}, which "
                "is followed here: its database was restored from a copy, or "
                "rebuilt. Until it has a "
                "newer one nothing of it is followed; a producer that is started "
                "again takes what the "
                "metaserver has"
            )
            if line := self._troubles.met(text, self._clock.boot_ms(), _OLDER):
                log.warning("route of %s: %s", self.subject, line)
            return False
        self._route = route
        self.message_bytes_max = route.message_bytes_max
        self.queue_starts.follow(route)
        self._routed.set()
        open_ids = {partition.partition_id for partition in route.open_partitions()}
        self._partition_ids = [partition.partition_id for partition in route_table(route)]
        for partition in route.open_partitions():
            if partition.partition_id not in self._executors:
                self._executors[partition.partition_id] = self._new_executor(partition, route)
        self._follow_brokers(route.partitions)
        listed = {partition.partition_id for partition in route.partitions}
        for partition_id, executor in list(self._executors.items()):
            if partition_id in open_ids:
                executor.heard(ExecutorEvent.OPEN_IN_ROUTE)
                continue
            closed = partition_id in listed
            executor.heard(ExecutorEvent.CLOSED_IN_ROUTE if closed else ExecutorEvent.NOT_IN_ROUTE)
            if executor.idle:
                self._retire(executor)
        self._refill()
        return True

    async def _seek_brokers(self) -> None:
        """
        Ask for the addresses of brokers that do not answer and whose partitions the route no longer
        lists.

        Only these brokers know whether a batch that was sent to them is stored.
        """
        states = [executor.state for executor in self._executors.values()]
        if any(state.gone and not state.available for state in states):
            await self.ask_history()

    async def ask_history(self) -> set[str]:
        """
        Ask the metaserver which partitions are lost and where their brokers are now, and notify the
        executors.

        Returns:
            The names of the broker groups that are silent.

        Raises:
            KeylaneError: the call failed.
        """
        history = await self._meta.call(endpoints.HISTORY, subject=self.subject)
        for entry in history.partitions:
            executor = self._executors.get(entry.partition.partition_id)
            if executor is not None and entry.lost:
                executor.heard(ExecutorEvent.LOSS_ACCEPTED)
        self._follow_brokers(entry.partition for entry in history.partitions)
        return {
            entry.partition.broker_group
            for entry in history.partitions
            if not entry.partition.address
        }

    def _follow_brokers(self, partitions: Iterable[Partition]) -> None:
        """Give executors the present addresses of their broker groups, including executors of
        partitions that are not open.
        """
        addresses = {
            partition.broker_group: partition.address
            for partition in partitions
            if partition.address
        }
        for executor in self._executors.values():
            address = addresses.get(executor.partition.broker_group)
            if address is not None and address != executor.partition.address:
                executor.moved(address, self._broker_at(address))

    def _retire(self, executor: Executor) -> None:
        """Close the executor of a partition that is not open; its messages are settled, or held."""
        if self._executors.pop(executor.partition.partition_id, None) is not None:
            start_task(executor.close())

    def emptied(self, executor: Executor) -> None:
        """Close an executor that has no message left, and send the newer messages of its range."""
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
            static=route.static,
            identity=self._identity,
            settings=self._settings,
            clock=self._clock,
            rng=self._rng,
            budget=self._budget,
            epochs=self._epochs,
            turn=self._turn,
        )

    # ── leaving a partition ───────────────────────────────────────────────────────────────────────
    def availability_changed(self) -> None:
        """Ask for a newer route, and keep messages without a key away from partitions that do not
        answer.
        """
        self._refresh.set()
        self._refill()

    def _refill(self) -> None:
        self._fill_table()
        self._release_held()
        self._pass_over()

    def _fill_table(self) -> None:
        """
        Find the executor of each logical partition.

        Messages are held (None) while their partition is sealed or has refused them and there is no
        newer route, and also while an earlier partition of their range still has messages. A range
        whose messages went elsewhere (BEST_TRIED) goes there until its own partition answers again.
        """
        route = self._route
        if route is None:
            self.careful = bool(self._halts.keys)
            return
        usable = {
            partition_id: executor
            for partition_id, executor in self._executors.items()
            if executor.state.in_use
        }
        self._home_table = [usable.get(partition_id) for partition_id in self._partition_ids]
        spare = self._spare()
        self._renew_stand_ins(usable, spare)
        self.careful = bool(self._away or self._halts.keys)
        taker: dict[int, Executor | None] = {}
        for partition_id, home in usable.items():
            there = self._away.get(partition_id, home)
            taker[partition_id] = None if home.state.refuses or there.state.refuses else there
        table = [taker.get(partition_id) for partition_id in self._partition_ids]
        for executor in self._executors.values():
            if executor.state.left:
                left = executor.partition
                width = left.range_end - left.range_start
                table[left.range_start : left.range_end] = [None] * width
        self.table = self.keyless = table
        if spare and not all(map(_answers, taker.values())):
            self.keyless = [
                executor if _answers(executor) else spare[logical % len(spare)]
                for logical, executor in enumerate(table)
            ]
        self._choose_plain()

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
                # No older message of this range waits there.
                del self._away[partition_id]
                if spare:
                    self._away[partition_id] = self._rng.choice(spare)

    def _pass_over(self) -> None:
        """Move messages without a key away from partitions that do not answer, unless they were
        already sent there.
        """
        spare = self._spare()
        if not spare:
            return

        def sieve(batch: OutgoingBatch) -> OutgoingBatch | None:
            if not batch.free:
                return batch
            taken, rest = batch.divided(batch.is_free)
            self._budget.replaced(batch, taken, rest)
            if taken is not None:
                self._rng.choice(spare).take_over([taken])
            return rest

        for executor in self.executors:
            if not executor.state.available:
                executor.sift(sieve)

    def _spare(self) -> list[Executor]:
        """Return the executors that may take messages of other partitions, sorted by
        partition id.
        """
        return [executor for executor in self.executors if executor.state.spare]

    def has_spare(self, executor: Executor) -> bool:
        """Return True if batches of `executor` may go elsewhere under BEST_TRIED."""
        return bool(self._others(executor))

    def _others(self, executor: Executor) -> list[Executor]:
        """Return the executors to which batches of `executor` may go under BEST_TRIED."""
        return [spare for spare in self._spare() if spare is not executor]

    def take_back(self, executor: Executor, batches: list[OutgoingBatch], step: Step) -> None:
        """Hand batches that left their partition to another executor, or hold them until there is a
        newer route.
        """
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
        # Newer messages of the range wait after these until there is a newer route.
        self.held.put_first(batches)
        self._refresh.set()
        self._refill()

    def _release_held(self) -> None:
        """Hand held messages to their executors, the oldest first; messages without an executor
        stay held.
        """
        held = self.held.take_sendable(self.queue_starts, self.message_bytes_max)
        adopting: dict[int, Executor] = {}
        still_held: OutgoingBatch | None = None
        for batch in held:
            self._budget.leave(batch)
            for index, key in enumerate(batch.keys):
                if batch.expired and batch.is_withdrawn(index):
                    continue
                size = len(batch.values[index])
                place = batch.place_of(index)
                if place is not None:
                    logical = self.queue_starts.logical(place)
                else:
                    logical = logical_partition(key) if key else self._rng.getrandbits(10)
                executor = (self.keyless if batch.is_free(index) else self.table)[logical]
                if executor is None:
                    still_held = self.held.keep(still_held, batch, index)
                    continue
                if id(executor) not in adopting or self.held.is_full(executor.open, size):
                    adopting[id(executor)] = executor
                    executor.roll()
                executor.open.adopt(batch, index)
                if key and executor is not self._home_table[logical]:
                    executor.open.mark(len(executor.open) - 1, REORDERED)
        for executor in adopting.values():
            executor.roll()

    async def close(self) -> None:
        """Stop all executors, and give up the messages that are not settled."""
        self._closing = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        error = ClosedError(CLOSED)
        error.hint = CLOSED_HINT
        await self._give_up_all(error)

    async def _give_up_all(self, error: KeylaneError) -> None:
        self._refusal = error
        self._routed.set()
        if self._expiring is not None:
            self._expiring.cancel()
        left: list[OutgoingBatch] = []
        try:
            for executor in self.executors:
                left += await executor.close()
        finally:
            self.held.put_first(left)
        self.held.give_up(error)


def _answers(executor: Executor | None) -> TypeGuard[Executor]:
    return executor is not None and executor.state.available


def _is_final(error: KeylaneError) -> bool:
    """Return True if a refused route means that no message of the subject can be sent: its order
    strategy was changed, or it was deleted.
    """
    return isinstance(error, SubjectDeletedError) or error.reason is Reason.ORDER_STRATEGY
