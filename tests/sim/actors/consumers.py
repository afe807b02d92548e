"""Simulated consumers: the product's own, with slow, failing and wrapped handlers, and a record of
what they handle.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from keylane.consumer.client import Consumer
from keylane.consumer.dispatch.workers import WorkerPool
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import KeylaneError, RetryRule
from keylane.protocol.message import EDITED_PROPERTY, Message
from keylane.rpc.environment import Environment
from keylane.testing.machines.machine import SimStopSignals, send_stop
from keylane.testing.machines.network import SimNetwork
from sim.actors.clients import SUBJECT, Record
from sim.actors.elsewhere import Calls, Visitor, calls_of_consumer
from sim.actors.handlers import WRAPPED, failure, plain
from sim.actors.hosts import Host
from sim.actors.users import SHARED, Identities, Preloaded, cancelled
from support.observation import Telling, dropped, ended, started

BESIDE = "beside"
"""The group of consumers that are company."""


class ConsumerHost(Host):
    """Handles messages, at times slowly, at times with a failure; joins, leaves and crashes on
    request.
    """

    subject = SUBJECT

    def __init__(
        self,
        *args: Any,
        record: Record,
        meta: list[str],
        group: str,
        ttl_ms: int,
        manners: dict[str, float],
        settings: dict[str, Any],
        left_ms: Callable[[str], int | None],
        habits: frozenset[str],
        preloaded: Preloaded,
        poison: set[bytes],
    ) -> None:
        super().__init__(*args)
        self._habits = habits
        self._preloaded = preloaded
        self._poison = poison
        """Keys whose handlers fail."""
        self._rng = random.Random(f"{self.name} {self.rng.getstate()[1][:2]}")
        """For what users do, so that the rest is as it is without them."""
        self._identities = Identities(random.Random(self._rng.getrandbits(64)))
        self._company_identities = Identities(random.Random(f"company of {self.name}"))
        self._left_ms = left_ms
        self._record = record
        self._meta = meta
        self.group = group
        self._shared = group == SHARED
        if self._shared:  # what was lost on its way comes again in good time
            settings = settings | {"consume_strategy": "shared", "in_flight_ms": 2_000}
        settings = {"on_failure": "block"} | settings  # the judge wants order of best_tried too
        self._manners = manners
        self._settings = ConsumerSettings(
            ttl_ms=ttl_ms,
            call_timeout_ms=1_000,
            pull_wait_ms=1_000,
            handover_ms=500,
            handler_backoff=Backoff(first_ms=50, max_ms=500),
            **settings,
        )
        self.calm = False
        """True once handlers are quick and never fail."""
        self.consumer: Consumer | None = None
        self._bodies = copy.copy(self.rng)
        """How long the bodies of an iteration take."""
        self._bad_keys = copy.copy(self.rng).random() < manners["bad_keys"]
        """Every second key fails, in handlers that wait, until all is calm."""
        self.inside = 0
        """Handlers that run."""
        self._unacked: Message | None = None
        """What the body of an iteration is in."""
        self._in_handlers: dict[tuple[str, int, int], Message] = {}
        """By session, partition and offset: what handlers were begun with and have not ended."""
        self._iterating = self._stopped = False
        self._batched = False
        """Its handler gets lists of messages."""
        self.on_message: Callable[[Message], None] | None = None
        """Told of each message that a handler begins with."""
        self.instance: str | None = None
        """The name of its place in the group, which it takes back at each start."""
        self._lives = 0
        """How often it was opened."""
        self.has_company = False
        """A consumer of another group is open in the process."""

    def start(self) -> None:
        process = self.new_process()
        self.leaving = self._iterating = self._stopped = False
        self.spawn(self._run(), process.context.copy())
        if "loops" in self._habits:
            Visitor(self, self._calls_elsewhere)

    def _calls_elsewhere(self) -> Calls:
        return {} if self.consumer is None else calls_of_consumer(self.consumer, self._unacked)

    def leave(self) -> None:
        """Close cleanly."""
        if self.running and not self.leaving and self.consumer is not None:
            self.leaving = True
            self.process.context.copy().run(self._close)

    def _close(self) -> None:
        self.spawn(self._leave(), self.process.context.copy())

    def suspend(self, seconds: float) -> None:
        """Suspend the consumer for a while."""
        if self.running and not self.leaving and self.consumer is not None:
            self._spawn_here(self._suspend(self.consumer, seconds))

    def reopen(self, pause_s: float) -> None:
        """Close cleanly, and open the same object again."""
        if self.running and not self.leaving and self.consumer is not None:
            self.leaving = True
            self._spawn_here(self._reopen(self.consumer, pause_s))

    def _spawn_here(self, work: Any) -> None:
        self.process.context.copy().run(self.spawn, work, self.process.context.copy())

    async def _suspend(self, consumer: Consumer, seconds: float) -> None:
        with contextlib.suppress(KeylaneError):  # told or not: the reset ends in time
            await consumer.suspend()
        await asyncio.sleep(seconds)
        while self.consumer is consumer:
            try:
                await consumer.resume()
                return
            except KeylaneError:
                await asyncio.sleep(0.2)

    async def _leave(self) -> None:
        assert self.consumer is not None
        await self._close_consumer(self.consumer)
        self.end(machine_down=False)

    async def _close_consumer(self, consumer: Consumer) -> None:
        self.consumer = None
        self._drop_in_hand()
        if "cancel" in self._habits and self._rng.random() < 0.4:
            await cancelled(consumer.close, self._rng)
            self._drop_in_hand()
        await consumer.close()

    def _drop_in_hand(self) -> None:
        """Closing gives up what the body of an iteration is in, as the user is told."""
        if self._unacked is not None:
            self._dropped(self._unacked)

    async def _reopen(self, consumer: Consumer, pause_s: float) -> None:
        await self._close_consumer(consumer)
        await asyncio.sleep(pause_s)
        while self._iterating:  # one task at a time
            await asyncio.sleep(0.01)
        self.leaving = False
        await self._live(consumer)

    def end(self, *, machine_down: bool) -> None:
        super().end(machine_down=machine_down)
        for message in list(self._in_handlers.values()):
            self._dropped(message)  # no handler runs on in a process that has ended
        self.leaving = False
        self.inside = 0
        self.consumer = self._unacked = None

    async def _run(self) -> None:
        by_hand = self._manners["by_hand"] > self.rng.random()
        quick = not by_hand and self._manners["quick"] > self.rng.random()
        self._by_hand = by_hand
        handler: Any = None if by_hand else self._handle_at_once if quick else self._any_handler()
        if handler is not None and "wrap" in self._habits:
            handler = WRAPPED[self._rng.choice(sorted(WRAPPED))]
        elif not by_hand and not quick and "forked" in self._habits:
            handler = plain
        network = _TellingNetwork(self.internet, self.process, self._record)
        parts = (network, self.machine, self._identities, self)
        if "forked" in self._habits:
            kind = f"{self.group} {by_hand} {quick} {handler!r}"
            make = functools.partial(self._make, handler)
            consumer = self._preloaded.copy(kind, make, parts)
        else:
            consumer = self._make(handler, *parts)
        if self.has_company:
            self.spawn(self._keep_company(network), self.process.context.copy())
        await self._live(consumer)

    async def _keep_company(self, network: SimNetwork) -> None:
        """Have a consumer of a group of its own beside the host's, which handles whatever comes."""

        def take(message: Message) -> None:
            clock_ns = self.machine.boot_ns()
            self._record(
                started(message, group=BESIDE, clock_ns=clock_ns, ours=False, left_ms=self._left_ms)
            )
            self._record(ended(message, group=BESIDE))

        while True:
            companion = Consumer(
                self._meta,
                subject=self.subject,
                group=BESIDE,
                handler=take,
                settings=replace(self._settings, name=f"{self.name}-beside"),
                _environment=Environment(
                    network=network,
                    clock=self.machine,
                    rng=random.Random(self.name),
                    draw_identity=self._company_identities,
                    stop_signals=SimStopSignals,
                ),
            )
            try:
                async with companion:
                    await companion.wait()
            except KeylaneError:
                await asyncio.sleep(0.3)

    def _make(
        self, handler: Any, network: SimNetwork, clock: Any, identities: Identities, _me: Any
    ) -> Consumer:
        rng = self.rng
        if "seeded" in self._habits:
            rng = random.Random(7)
        elif "forked" in self._habits:
            rng = random.Random(self._rng.getrandbits(64))
        return Consumer(
            self._meta,
            subject=self.subject,
            group=self.group,
            **{"batch_handler" if self._batched else "handler": handler},
            settings=replace(self._settings, name=self.name, instance=self.instance or ""),
            _environment=Environment(
                network=network,
                clock=clock,
                rng=rng,
                draw_identity=identities,
                stop_signals=SimStopSignals,
            ),
        )

    async def _live(self, consumer: Consumer) -> None:
        """Run the consumer from its opening to its end."""
        while True:
            if "cancel" in self._habits and self._rng.random() < 0.4:
                if await cancelled(consumer.__aenter__, self._rng):
                    break
                continue
            try:
                await consumer.__aenter__()
                break
            except KeylaneError as error:
                if error.retry is RetryRule.NEVER:
                    raise
                await asyncio.sleep(0.3)
        self.consumer = consumer
        if self._by_hand:
            self.spawn(self._iterate(consumer), self.process.context.copy())
        self._lives += 1
        life = self._lives
        while "cancel" in self._habits and self._rng.random() < 0.7:
            await cancelled(consumer.wait, self._rng, within_s=10.0)
        if life != self._lives or self.consumer is None:  # it was closed meanwhile
            return
        if "run" not in self._habits:
            await consumer.wait()
            return
        await consumer.run()
        while self._stopped and self._iterating:
            await asyncio.sleep(0.01)
        if self._stopped:
            self.end(machine_down=False)

    def stop(self) -> None:
        """Send the process a signal to stop."""
        if self.running and not self.leaving and self.consumer is not None:
            self.leaving = self._stopped = True
            self.consumer = None
            self.loop.post(self.process, self._hear_signal)

    def _hear_signal(self) -> None:
        self._drop_in_hand()  # the body of an iteration has a moment to end, and no promise
        if not send_stop(self.process):  # the program is not in `run`, but in a `wait` before it
            self.end(machine_down=False)

    def _any_handler(self) -> Any:
        """The handler as users write it: itself, or behind something that gives its coroutine, or a
        task of it, back.
        """
        as_given = (
            self._handle,
            lambda message: self._handle(message),  # noqa: PLW0108 - what users write
            lambda message: asyncio.ensure_future(self._handle(message)),
        )
        return as_given[int(len(as_given) * self._bodies.random())]

    def _started(self, message: Message, *, ours: bool = False) -> None:
        if self._shared:  # no order, no owner: it counts what was handled
            return
        if self.on_message is not None:
            self.on_message(message)
        clock_ns = self.machine.boot_ns()
        event = started(
            message, group=self.group, clock_ns=clock_ns, ours=ours, left_ms=self._left_ms
        )
        self._record(event)
        self._in_handlers[event.session, event.partition_id, event.offset] = message

    def _dropped(self, message: Message) -> None:
        if not self._shared:
            event = dropped(message)
            self._in_handlers.pop((event.session, event.partition_id, event.offset), None)
            self._record(event)

    def _ended(self, message: Message) -> None:
        event = ended(message, group=self.group)
        self._in_handlers.pop((event.session, event.partition_id, event.offset), None)
        self._record(event)

    def _stumble(self) -> None:
        if not self.calm and self.rng.random() < self._manners["fails"]:
            raise RuntimeError("the handler failed, as handlers do")
        if not self.calm and "odd" in self._habits and self._rng.random() < 0.03:
            raise failure(self._rng)

    def _check_poison(self, message: Message) -> None:
        if message.key in self._poison and EDITED_PROPERTY not in message.properties:
            raise ValueError("the handler fails for this key")

    def _handle_at_once(self, message: Message) -> None:
        self._started(message)
        self._check_poison(message)
        self._stumble()
        self._ended(message)

    async def _handle(self, message: Message) -> None:
        self._started(message, ours=True)
        rng = self.rng
        self.inside += 1
        try:
            if self._bad_keys and not self.calm and sum(message.key) % 2:
                await asyncio.sleep(0.001)
                raise RuntimeError("this key fails")
            if not self.calm and rng.random() < self._manners["slow"]:
                await asyncio.sleep(2 * rng.random() * self._settings.ttl_ms / 1000)
            elif rng.random() < 0.5:
                await asyncio.sleep(0.02 * rng.random())
            self._check_poison(message)
            self._stumble()
        except asyncio.CancelledError:
            if "stubborn" not in self._habits or not await self._outlasts_cancellation():
                self._dropped(message)
                raise
        except BaseException:
            self._dropped(message)
            raise
        finally:
            self.inside -= 1
        self._ended(message)

    async def _outlasts_cancellation(self) -> bool:
        """Ignore cancellations for a while; return whether the handler then ends as if it had not
        been cancelled.
        """
        until_s = self.loop.now + self._rng.random() * self._rng.choice((0.1, 1.0, 3.0))
        while self.loop.now < until_s:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(max(0.001, until_s - self.loop.now))
        return self._rng.random() < 0.5

    def is_idle_beside_work(self) -> bool:
        """Whether fetched messages wait although some worker is in no handler."""
        consumer = self.consumer
        if consumer is None or not self.running or self.process.paused:
            return False
        opening = consumer._last_opening
        workers = None if opening is None else opening.dispatcher
        if not isinstance(workers, WorkerPool) or not workers.has_jobs:
            return False
        return self.inside < self._settings.concurrency

    async def _iterate(self, consumer: Consumer) -> None:
        self._iterating = True
        await self._iterate_all(consumer)
        self._iterating = False

    async def _iterate_all(self, consumer: Consumer) -> None:
        async for message in consumer:
            self._unacked = message
            self._started(message, ours=not self._stopped)
            if not self.calm and self._bodies.random() < self._manners["slow"]:
                await asyncio.sleep(2 * self._bodies.random() * self._settings.ttl_ms / 1000)
            elif self.rng.random() < 0.3:
                await asyncio.sleep(0.01 * self.rng.random())
            self._ended(message)
            self._unacked = None
            try:
                await message.ack()
            except KeylaneError:
                continue


class _TellingNetwork(SimNetwork):
    """Notes what a consumer tells the metaserver of its leases, at the moment of telling."""

    def __init__(self, internet: Any, process: Any, record: Record) -> None:
        super().__init__(internet, process)
        self._note = record
        self._telling = Telling()

    async def control(self, method: str, address: str, path: str, *args: Any, **kwargs: Any) -> Any:
        for event in self._telling.events(path, kwargs.get("body")):
            self._note(event)
        return await super().control(method, address, path, *args, **kwargs)
