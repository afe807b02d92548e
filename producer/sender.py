"""Messages of one subject on their way to executors: the route table, and what happens while there is none.

Invariants
    The messages of one key reach one executor at a time, in the order they were sent; when their partition is
    left, the older ones go first and newer ones wait in the hold: until the newer route is here, and until the
    partition that is left has answered, or refused, all it was sent.
    What is held has no executor in the table: whatever fills the table hands over the hold, oldest first.

    send() ─▶ table[logical partition] ─▶ executor          hold: a parcel of messages without a partition yet
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
from ..protocol.routing import OrderStrategy, Partition, Route, logical_partition, route_table
from ..rpc.client import BrokerClient, MetaClient
from .account import Account
from .executor import Executor, MessageGroup
from .failure import Step
from .identity import Identity
from .parcel import Parcel
from .settings import ProducerSettings
from .ticket import Ticket

log = logging.getLogger("keylane.producer")
CLIENT_TYPE = "producer"
AMISS_WAIT_MS = 500


class SubjectSender:
    """The executors of one subject and the table that leads to them.  `table[lp]` is None while held."""

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
        dice: random.Random,
        account: Account,
        on_dead: Callable[[SubjectSender], None],
    ) -> None:
        self.subject = subject
        self.table: list[Executor | None] = [None] * LOGICAL_PARTITIONS
        self.diverted = False
        """True while some partition does not answer and BEST_TRIED sends its messages elsewhere."""
        self._asked = strategy
        self._meta = meta
        self._broker_at = broker_at
        self._identity = identity
        self._settings = settings
        self._clock = clock
        self._dice = dice
        self._account = account
        self._on_dead = on_dead
        self._loop = asyncio.get_running_loop()
        self._route: Route | None = None
        self._outdated: int | None = None
        """The version of the route that was followed when the metaserver had only older ones; told once."""
        self._executors: dict[int, Executor] = {}
        self._epochs = itertools.count()
        self._hold: list[Parcel] = [Parcel(self._loop.create_future())]
        self._open: set[int] = set()
        self._places: list[int] = []
        self._home: list[Executor | None] = [None] * LOGICAL_PARTITIONS
        self._refresh = asyncio.Event()
        self._task = asyncio.create_task(self._follow_route(), name=f"route {subject}")

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────
    def hold(self, key: bytes, value: bytes, packed_properties: bytes, sent_at_ns: int) -> Ticket:
        """Keep a message that has no executor now."""
        parcel = self._hold[-1]
        if self._full(parcel, len(value)):
            parcel = Parcel(self._loop.create_future())
            self._hold.append(parcel)
        size = parcel.size
        index = parcel.add(key, value, packed_properties, sent_at_ns)
        self._account.enter(1, parcel.size - size)
        return Ticket(parcel, index)

    def declare(self, executor: Executor, place: int) -> None:
        """A message of logical partition `place` is next: where that is not `executor`'s, its receipt says so."""
        if executor is not self._home[place] and not executor.open.reordered:
            executor.roll(reordered=True)

    @property
    def executors(self) -> list[Executor]:
        """One for each message group, by partition id."""
        return [self._executors[key] for key in sorted(self._executors)]

    def roll(self) -> None:
        """Let everything gathered so far go."""
        for executor in self._executors.values():
            executor.roll()

    # ── the route ────────────────────────────────────────────────────────────────────────────────────
    async def _follow_route(self) -> None:
        attempt = 0
        while True:
            try:
                if self._apply(await self._ask()):
                    await self._seek_brokers()
                    attempt = 0
                    continue
            except KeylaneError as error:
                if error.retry is Retry.NEVER and self._route is None:
                    self._die(error)
                    return
                log.info("route of %s: %s", self.subject, error.message)
            attempt += 1
            await asyncio.sleep(self._settings.backoff.wait_ms(attempt, self._dice) / 1000)

    async def _ask(self) -> Route:
        """A newer route when there is one; the same after a while, a short one when something is amiss."""
        known = self._route
        ask = partial(
            self._meta.route,
            self.subject,
            known_version=-1 if known is None else known.version,
            order_strategy=self._asked,
        )
        amiss = self._refresh.is_set() or self._amiss()
        self._refresh.clear()
        if known is None or amiss:
            # Soon answered: whatever else goes amiss meanwhile, perhaps often, waits for that.
            return await ask(wait_ms=AMISS_WAIT_MS)
        call = asyncio.create_task(ask(wait_ms=PULL_WAIT_MS_MAX))
        refresh = asyncio.create_task(self._refresh.wait())
        try:
            await asyncio.wait((call, refresh), return_when=asyncio.FIRST_COMPLETED)
            return await call if call.done() else known
        finally:
            call.cancel()
            refresh.cancel()
            await asyncio.gather(call, refresh, return_exceptions=True)

    def _amiss(self) -> bool:
        return None in self._home or any(not one.available for one in self._executors.values())

    def _die(self, error: KeylaneError) -> None:
        """The metaserver will never give a route: everything held is given up."""
        self._on_dead(self)
        for parcel in self._hold:
            if len(parcel):
                parcel.settle(error)
                self._account.settled(parcel, error)

    def _apply(self, route: Route) -> bool:
        """Follow a route; False if it is older than the one followed, which changes nothing."""
        if self._route is not None and route.version < self._route.version:
            self._tell_of_older(route)
            return False
        self._route = route
        self._open = {one.partition_id for one in route.open_partitions()}
        self._places = [one.partition_id for one in route_table(route)]
        for partition in route.open_partitions():
            if partition.address is not None and partition.partition_id not in self._executors:
                self._executors[partition.partition_id] = self._new_executor(partition, route)
        self._follow_brokers(route.partitions)
        listed = {one.partition_id for one in route.partitions}
        for partition_id, executor in list(self._executors.items()):
            executor.gone = partition_id not in listed
            if partition_id not in self._open:
                executor.leaving = True
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
        if any(one.gone and not one.available for one in self._executors.values()):
            history = await self._meta.history(self.subject)
            self._follow_brokers(one.partition for one in history.partitions)

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

    def _emptied(self, executor: Executor) -> None:
        """A partition that is open no more has answered everything: newer messages of its range may go."""
        self._retire(executor)
        self._refill()

    def _new_executor(self, partition: Partition, route: Route) -> Executor:
        assert partition.address is not None
        group = MessageGroup(CLIENT_TYPE, self.subject, partition.name, partition.broker_group)
        return Executor(
            group,
            partition,
            self._broker_at(partition.address),
            strategy=route.order_strategy,
            identity=self._identity,
            settings=self._settings,
            clock=self._clock,
            dice=self._dice,
            spare=self._others,
            on_leave=self._leave,
            account=self._account,
            epochs=self._epochs,
            on_available=self._availability_changed,
            on_empty=self._emptied,
        )

    # ── leaving a partition ──────────────────────────────────────────────────────────────────────────
    def _availability_changed(self) -> None:
        self._refresh.set()
        self._refill()

    def _refill(self) -> None:
        self._fill_table()
        self._drain_hold()

    def _fill_table(self) -> None:
        """
        Where each message goes now.  None, into the hold: its partition is sealed or has refused it, and the newer
        route is not here, or the partition before it still has messages.  Under BEST_TRIED, ranges of partitions
        that do not answer go to one that does.
        """
        route = self._route
        if route is None:
            return
        usable = {key: one for key, one in self._executors.items() if not one.sealed}
        self._home = [usable.get(partition_id) for partition_id in self._places]
        self.table = [None if one is None or one.refused else one for one in self._home]
        spare = self._spare()
        lost = {id(one): one for one in self.table if one is not None and not one.available}
        self.diverted = bool(lost and spare and route.order_strategy is OrderStrategy.BEST_TRIED)
        if self.diverted:
            instead = {key: self._dice.choice(spare) for key in lost}
            self.table = [instead.get(id(home), home) for home in self.table]
        for executor in self._executors.values():
            if executor.leaving:
                left = executor.partition
                width = left.range_end - left.range_start
                self.table[left.range_start : left.range_end] = [None] * width

    def _spare(self) -> list[Executor]:
        """The executors that may take messages of others, by partition id."""
        return [one for one in self.executors if one.available and not (one.sealed or one.leaving)]

    def _others(self, executor: Executor) -> list[Executor]:
        """Where parcels of `executor` may go under BEST_TRIED."""
        return [one for one in self._spare() if one is not executor]

    def _leave(self, executor: Executor, parcels: list[Parcel], step: Step) -> None:
        if step is Step.ELSEWHERE:
            for parcel in parcels:
                parcel.reordered = True
            self._dice.choice(self._others(executor)).take_over(parcels)
            return
        # Newer messages of its range wait behind these until a newer route is here.
        self._hold = [*parcels, *self._hold]
        self._refill()
        self._refresh.set()

    def _drain_hold(self) -> None:
        """Hand the held messages to their executors, oldest first."""
        held, self._hold = self._hold, [Parcel(self._loop.create_future())]
        adopting: dict[int, Executor] = {}
        still_held: Parcel | None = None
        for parcel in held:
            self._account.leave(parcel)
            for index, key in enumerate(parcel.keys):
                size = len(parcel.values[index])
                place = logical_partition(key) if key else self._dice.getrandbits(10)
                executor = self.table[place]
                if executor is None:
                    still_held = self._hold_again(still_held, parcel, index)
                    continue
                if id(executor) not in adopting or self._full(executor.open, size):
                    adopting[id(executor)] = executor
                    executor.roll()
                self.declare(executor, place)
                executor.open.adopt(parcel, index)
                executor.open.tries = max(executor.open.tries, parcel.tries)
        for executor in adopting.values():
            executor.roll()

    def _hold_again(self, last: Parcel | None, parcel: Parcel, index: int) -> Parcel:
        """Keep a message held, in a parcel of its own kind; returns that parcel."""
        if last is None or self._full(last, len(parcel.values[index])):
            last = Parcel(self._loop.create_future())
            self._hold.insert(len(self._hold) - 1, last)
        size = last.size
        last.adopt(parcel, index)
        last.tries = max(last.tries, parcel.tries)
        self._account.enter(1, last.size - size)
        return last

    def _full(self, parcel: Parcel, value_bytes: int) -> bool:
        """True if a message with such a value does not belong into `parcel` any more."""
        settings = self._settings
        return (
            parcel.size >= settings.batch_bytes
            or len(parcel) >= settings.batch_count
            or (len(parcel) > 0 and value_bytes > settings.large_bytes)
        )

    async def close(self) -> None:
        """Stop everything; what is not settled is given up."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for executor in self.executors:
            for parcel in await executor.close():
                self._give_up(parcel)
        for parcel in self._hold:
            if len(parcel):
                self._give_up(parcel)

    def _give_up(self, parcel: Parcel) -> None:
        error = NoPartitionError("the producer was closed before this message was acked")
        parcel.give_up(error)
        self._account.settled(parcel, error)
