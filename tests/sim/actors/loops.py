"""Simulated consumers that take messages in loops of their own, one or many at a time, or in
batches; they give back what fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from keylane.checker.events import SetAside
from keylane.consumer.client import Consumer
from keylane.consumer.dispatch.arrow import ArrowBatch
from keylane.consumer.dispatch.loop import LoopDispatch
from keylane.consumer.session.failure import Treatment, decide_treatment
from keylane.consumer.session_shell import SessionShell
from keylane.consumer.settings import FailurePolicy
from keylane.protocol.errors import ClosedError, KeylaneError
from keylane.protocol.message import EDITED_PROPERTY, Message
from sim.actors.clients import SUBJECT
from sim.actors.consumers import ConsumerHost, _TellingNetwork
from support.observation import started

HELD_MAX = 3
"""Messages that an iteration goes on without having acked."""


class _Group:
    """
    Messages of one key that a program was given together, or one message alone.

    Args:
        clock_ns: when they were given, by the boot clock of the machine.
        ours: the program asks for nothing more before it has ended with them.
    """

    def __init__(self, messages: list[Message], clock_ns: int, *, ours: bool) -> None:
        self.messages = messages
        self.clock_ns = clock_ns
        self.ours = ours


class LoopingHost(ConsumerHost):
    """
    A consumer that takes messages in another manner at each start: see `MANNERS`.

    The judge is told that the first message of a key begins when it is given, and the next ones
    when those before are acked.
    """

    manners: tuple[str, ...] = ()
    """Those to choose from; set by the feature."""
    work_s = 0.05
    """The time that a program takes for a message, at most; set by the feature, until all is
    calm.
    """
    manner = ""
    """That of its last start."""
    given_back = 0
    """Messages that loops gave back."""

    def start(self) -> None:
        self._groups: list[_Group] = []
        self._buried: set[tuple[int, int, int]] = set()
        """Partition, token and offset of messages of which it is noted that they are set aside
        alone.
        """
        self._asking = asyncio.Lock()
        super().start()

    async def _run(self) -> None:
        self.manner = self._bodies.choice(self.manners)
        handlers: dict[str, Any] = {"handler": self._handle, "batch handler": self._handle_batch}
        handler = handlers.get(self.manner)
        self._by_hand, self._batched = handler is None, self.manner == "batch handler"
        given, settings = self._settings, self._settings
        if self.manner == "batches":  # what is wrong with a row only the program knows
            settings = replace(settings, on_failure=FailurePolicy.BLOCK)
        self._settings = settings
        network = _TellingNetwork(self.internet, self.process, self._record)
        consumer = self._make(handler, network, self.machine, self._identities, self)
        self._watch_burials(consumer)
        self._settings = given
        await self._live(consumer)

    def hold(self, seconds: float) -> None:
        """Pause a partition for a while."""
        if self.running and not self.leaving and self.consumer is not None:
            self._spawn_here(self._pause(self.consumer, seconds))

    async def _pause(self, consumer: Consumer, seconds: float) -> None:
        with contextlib.suppress(KeylaneError):
            partition_id = self._bodies.choice(sorted(consumer._clients) or [0])
            await consumer.pause(partition_id)
            await asyncio.sleep(seconds)
            await consumer.resume(partition_id)

    def is_idle_beside_work(self) -> bool:
        return not self._batched and super().is_idle_beside_work()

    # ── what the judge is told ────────────────────────────────────────────────────────────────────
    def _given(self, messages: list[Message], *, ours: bool) -> list[_Group]:
        """Note that the program was given messages, and has begun with the first one of each
        key.
        """
        by_key: dict[bytes | int, list[Message]] = {}
        for message in messages:
            by_key.setdefault(message.key or id(message), []).append(message)
        clock_ns = self.machine.boot_ns()
        groups = [_Group(each, clock_ns, ours=ours) for each in by_key.values()]
        for group in groups:
            self._started(group.messages[0], ours=ours and not self._stopped)
        self._groups += groups
        return groups

    def _begun(self, message: Message, group: _Group) -> None:
        """Note that the program goes on with the next message of a group, which it has had in
        hand.
        """
        named = {"group": self.group, "clock_ns": group.clock_ns, "ours": False}
        self._record(started(message, **named, with_earlier=True))  # type: ignore[arg-type]

    def _handled(self, group: _Group, count: int) -> None:
        """Note that the first `count` messages of a group are handled."""
        for number, message in enumerate(group.messages[:count]):
            if number:
                self._begun(message, group)
            self._ended(message)

    def _let_go(self, group: _Group) -> None:
        """Note that the first message of a group was not handled."""
        self._dropped(group.messages[0])

    def _drop_in_hand(self) -> None:
        for group in self._groups:
            self._let_go(group)
        self._groups.clear()

    def end(self, *, machine_down: bool) -> None:
        super().end(machine_down=machine_down)
        self._groups.clear()

    # ── what the program does with messages ───────────────────────────────────────────────────────
    def _fails(self, message: Message) -> bool:
        if message.key in self._poison and EDITED_PROPERTY not in message.properties:
            return True
        return not self.calm and self._bodies.random() < self._manners["fails"]

    async def _finish(self, group: _Group, consumer: Consumer) -> None:
        """Ack messages of a group, up to one that fails, which is given back, and with it those
        behind.
        """
        await self._work_on()
        if group not in self._groups:
            return  # the consumer was closed meanwhile
        self._groups.remove(group)
        messages = group.messages
        count = next((n for n, each in enumerate(messages) if self._fails(each)), len(messages))
        try:
            await consumer.ack(messages[:count])
        except KeylaneError:
            self._let_go(group)
            return
        self._handled(group, count)
        if count < len(messages):
            failed = messages[count]
            if count:
                self._begun(failed, group)
            after_s = self._bodies.choice((0, 0, 0.05, 0.3))
            self._note_burial(failed, consumer)
            with contextlib.suppress(KeylaneError):
                await failed.nack(after_s=after_s)
                self.given_back += 1
            self._dropped(failed)

    def _note_burial(self, message: Message, consumer: Consumer | None) -> None:
        """Note that a message fails for the last time under "dead": later ones of its key go on
        before its broker has it.
        """
        if consumer is None:
            return
        shell: Any = _shell_of(message)
        has_order = bool(message.key) and not message.delivery.is_loose  # type: ignore[union-attr]
        treatment = decide_treatment(
            shell.state.settings, attempt=message.attempt, has_order=has_order, is_asked=False
        )
        if treatment in {Treatment.ASIDE, Treatment.DEAD}:
            self._note_alone(message.partition_id, message.fencing_token, message.offset)

    def _note_alone(self, partition_id: int, token: int, offset: int) -> None:
        if (partition_id, token, offset) in self._buried:
            return
        self._buried.add((partition_id, token, offset))
        ranges = ((offset, offset + 1),)
        self._record(SetAside(self.group, partition_id, token, ranges, alone=True))

    def _watch_burials(self, consumer: Consumer) -> None:
        """Note what a consumer buries without asking its program: a message at which processes have
        ended.
        """
        new_opening = consumer._new_opening

        def watched(network: Any) -> Any:
            opening = new_opening(network)
            assert opening.assignments is not None
            make = opening.assignments._new_client

            def made(grant: Any) -> Any:
                shell = make(grant)
                self._watch_session(shell)
                return shell

            opening.assignments._new_client = made  # type: ignore[method-assign]
            return opening

        consumer._new_opening = watched  # type: ignore[method-assign]

    def _watch_session(self, shell: SessionShell) -> None:
        ask = shell.ask

        def watched(event: Any) -> list[Message]:
            messages = ask(event)
            for change in shell.state.parking._unstored_parks():
                for start, end in change.ranges if change.key is None else ():
                    for offset in range(start, end):
                        token = shell.state.tenure.lease.token
                        self._note_alone(shell.partition_id, token, offset)
            return messages

        shell.ask = watched  # type: ignore[method-assign]

    def _check_poison(self, message: Message) -> None:
        try:
            super()._check_poison(message)
        except ValueError:
            self._note_burial(message, self.consumer)
            raise

    def _stumble(self) -> None:
        """Messages fail by `_fails` alone, in `_check_poison`."""

    async def _work_on(self) -> None:
        rng = self._bodies
        if not self.calm and rng.random() < self._manners["slow"]:
            await asyncio.sleep(2 * rng.random() * self._settings.ttl_ms / 1_000)
        elif rng.random() < 0.5:
            await asyncio.sleep((0.02 if self.calm else self.work_s) * rng.random())

    async def _handle_batch(self, messages: list[Message]) -> None:
        self.inside += 1
        groups = self._given(messages, ours=True)
        try:
            await self._work_on()
            for message in messages:
                if self._fails(message):
                    if len(messages) == 1:
                        self._note_burial(message, self.consumer)
                    raise ValueError("the handler fails for this batch")
        except BaseException:
            for group in groups:
                if group in self._groups:
                    self._let_go(group)
            raise
        else:
            for group in groups:
                self._handled(group, len(group.messages))
        finally:
            self.inside -= 1
            self._groups = [each for each in self._groups if each not in groups]

    # ── loops ─────────────────────────────────────────────────────────────────────────────────────
    async def _iterate_all(self, consumer: Consumer) -> None:
        with contextlib.suppress(ClosedError):
            await LOOPS[self.manner](self, consumer)

    async def _one_by_one(self, consumer: Consumer) -> None:
        """Take a message, and end with it; at times leave the loop, and begin another one."""
        left = True
        while left:
            left = False
            async for message in consumer:
                (group,) = self._given([message], ours=True)
                await self._finish(group, consumer)
                if self._bodies.random() < 0.05:
                    left = True
                    break

    async def _holding(self, consumer: Consumer) -> None:
        """Go on with messages that are not acked; end with them in any order."""
        held: list[_Group] = []
        while True:
            try:
                async with asyncio.timeout(0.3):
                    message = await anext(consumer)
            except TimeoutError:
                pass
            except StopAsyncIteration:
                return
            else:
                held += self._given([message], ours=False)
            while held and (len(held) > HELD_MAX or self.calm or self._bodies.random() < 0.5):
                await self._finish(held.pop(self._bodies.randrange(len(held))), consumer)

    async def _many(self, consumer: Consumer) -> None:
        """Take many, and end with each key in turn, in any order of keys."""
        while True:
            messages = await consumer.getmany(
                max_records=self._bodies.choice((1, 3, 50)), timeout_ms=500
            )
            groups = self._given(messages, ours=True)
            self._bodies.shuffle(groups)
            for group in groups:
                await self._finish(group, consumer)

    async def _many_in_tasks(self, consumer: Consumer) -> None:
        """Take many in two tasks, of which one at a time asks."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(self._take_in_turn(consumer))

    async def _take_in_turn(self, consumer: Consumer) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                async with self._asking:
                    messages = await consumer.getmany(max_records=5, timeout_ms=200)
                for group in self._given(messages, ours=False):
                    await self._finish(group, consumer)

    async def _arrow(self, consumer: Consumer) -> None:
        """Take Arrow data; a batch that fails is given back whole."""
        async for batch in consumer.batches():
            groups = self._given(_rows(batch), ours=True)
            await self._work_on()
            if groups[0] not in self._groups:
                return
            self._groups = [each for each in self._groups if each not in groups]
            fails = not self.calm and self._bodies.random() < self._manners["fails"]
            try:
                await (batch.nack() if fails else batch.ack())
            except KeylaneError:
                fails = True
            for group in groups:
                if fails:
                    self._let_go(group)
                else:
                    self._handled(group, len(group.messages))


def _shell_of(message: Message) -> Any:
    return message.delivery.shell  # type: ignore[union-attr]


def _rows(batch: ArrowBatch) -> list[Message]:
    """The rows of a batch, as messages."""
    return [
        Message(
            subject=SUBJECT,
            key=row["key"],
            value=row["value"],
            offset=row["offset"],
            partition_id=batch.partition_id,
            sent_at_ns=0,
            fencing_token=batch.fencing_token,
            delivery=batch._shell.delivery,
        )
        for row in batch.record_batch.select(["offset", "key", "value"]).to_pylist()
    ]


def has_opened(host: ConsumerHost) -> bool:
    """True while a loop has opened messages that it did not hand out, and none is paused."""
    opening = host.consumer._last_opening if host.consumer is not None else None
    dispatch = None if opening is None else opening.dispatcher
    if not isinstance(dispatch, LoopDispatch):
        return False
    shells = list(dispatch.waiting.shells)
    has_any = any(shell.state.lanes.opened for shell in shells)
    return has_any and not any(shell.gate.is_paused for shell in shells)


LOOPS: dict[str, Callable[[LoopingHost, Consumer], Coroutine[Any, Any, None]]] = {
    "iteration": LoopingHost._one_by_one,
    "holding": LoopingHost._holding,
    "getmany": LoopingHost._many,
    "getmany in tasks": LoopingHost._many_in_tasks,
    "batches": LoopingHost._arrow,
}
MANNERS = (*LOOPS, "batch handler", "handler")


def draw_manners(rng: random.Random) -> tuple[str, ...]:
    """The manners of a seed: one, or all."""
    return rng.choice((*((each,) for each in MANNERS[:-1]), MANNERS, MANNERS))
