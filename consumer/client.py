"""The consumer users hold: a handler or `async for`, exclusive partitions, order kept per key."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from ..protocol.address import addresses_of
from ..protocol.clock import Clock, SystemClock
from ..protocol.errors import ClosedError
from ..protocol.ids import check_name
from ..protocol.message import Message
from ..protocol.routing import ConsumeStrategy
from ..rpc.client import MetaClient
from ..rpc.connections import Connections, clean_up
from ..rpc.home import Resident
from ..rpc.identity import DrawBits, from_system
from ..rpc.network import Network
from ..rpc.stop_signals import StopSignals
from .assignments import Assignments
from .handling.handlers import Handler, check_handler
from .handling.stream import Stream
from .handling.workers import Workers
from .membership import Membership
from .settings import ConsumerSettings

log = logging.getLogger("keylane.consumer")


@dataclass(frozen=True, slots=True)
class Assignment:
    """One partition this consumer holds."""

    partition_id: int
    fencing_token: int
    outstanding: int
    """Messages pulled and not yet handled."""
    waiting_for: str
    missed: int = 0
    """Messages that retention by time removed before this consumer got them."""


class Consumer(Resident):
    """
    Handles the messages of a subject for a consumer group; each partition is exclusive to one consumer, unless the
    group is shared.

        async def handle(message: Message) -> None: ...

        await Consumer("127.0.0.1:7000", subject="flights", group="audit", handler=handle).run()

    `run` ends at SIGTERM or SIGINT with everything handed over.  To do something beside it: `async with Consumer(...)`,
    and `run`, `wait` or nothing inside; leaving the block hands everything over too.

    With a handler, a message is acked when its handler returns.  One that raises is tried again in place, and later
    messages of its key wait.

    Without a handler: `async for message in consumer: ...; await message.ack()`, in one task.  While the loop's body
    runs, a partition with messages that the body has not acked stays here, for as long as heartbeats renew the lease:
    come for the next message, or close.  A message that was passed over without an ack comes again when its partition
    goes elsewhere, at the earliest `handover_ms` after the partition was asked for.  Closing the consumer has all
    messages that were not acked come again.

    A message may be handled again after a crash or a lost lease; `fencing_token` lets a store refuse a late one.

    A consumer works in the event loop and the process that it is opened in, and is refused elsewhere.  One that is
    made before a fork may be opened in each process, and one that was closed may be opened again: each opening is a
    member of its own.

    Args:
        meta: `host:port` of a metaserver, or several: in a list, or in one text with commas.
        subject: an existing subject.
        group: the consumer group; it exists from its first consumer on.
        handler: `async def`, called for many keys at once; or `def`, called on the event loop, so it must be quick.
            Whatever it returns and can be awaited is awaited before the message is acked; other values are ignored.
        concurrency: handlers at once, each on another key.
        ttl_ms: a consumer silent for so long loses its partitions; at least 1000.
        name: for people, shown with its partitions.
        strategy: "shared": every consumer of the group takes messages of every partition, in no order, each at
            least once.  The group's first consumer decides; a later one that says otherwise is refused.
        settings: all that can be set; the arguments above go before it.
        network, clock, rng: for tests, that script what a consumer meets.

    Raises:
        ConfigError, InvalidNameError: an argument that cannot work.
        HandlerTypeError: the handler is a generator function, async or not; also a TypeError.
    """

    def __init__(
        self,
        meta: str | Iterable[str],
        *,
        subject: str,
        group: str,
        handler: Handler | None = None,
        concurrency: int | None = None,
        ttl_ms: int | None = None,
        name: str | None = None,
        strategy: ConsumeStrategy | str | None = None,
        settings: ConsumerSettings | None = None,
        network: Network | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        _identity: DrawBits = from_system,
    ) -> None:
        check_name("subject", subject)
        check_name("consumer group", group)
        settings = settings or ConsumerSettings()
        self._settings = replace(
            settings,
            concurrency=concurrency if concurrency is not None else settings.concurrency,
            ttl_ms=ttl_ms if ttl_ms is not None else settings.ttl_ms,
            strategy=strategy or settings.strategy,  # type: ignore[arg-type]  # looked at there
        )
        self._addresses = addresses_of(meta)
        if handler is not None:
            check_handler(handler)
        self._subject = subject
        self._group = group
        self._handler = handler
        self._name = name
        self._connections = Connections(
            network, timeout_ms=self._settings.call_timeout_ms, what="consumer"
        )
        self._home = self._connections.home
        self._clock = clock or SystemClock()
        self._given_rng = rng
        self._draw_identity = _identity
        self._ended: asyncio.Future[None] | None = None
        self._clear()

    def _clear(self) -> None:
        """Set the state of a new opening: nothing of an earlier opening is in it, and nothing that a fork copied."""
        self._rng = self._given_rng or random.Random(secrets.randbits(64))
        self._membership: Membership | None = None
        self._dispatch: Workers | Stream | None = None
        self._assignments: Assignments | None = None
        self._ending: asyncio.Task[None] | None = None
        """Hands everything over, also after an error that ended the consumer."""

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────
    async def __aenter__(self) -> Self:
        """
        Join the group.

        Raises:
            NotSentError, OutcomeUnknownError: no metaserver answers; call it again.
            KeylaneError: refused by the metaserver, as an unknown subject; or open already.
        """
        network = self._connections.open()
        self._clear()
        self._ended = asyncio.get_running_loop().create_future()
        membership = self._membership = self._new_membership(network)
        dispatch = self._dispatch = self._new_dispatch()
        self._assignments = self._new_assignments(membership, dispatch)
        try:
            await membership.start(self._assignments)
        except BaseException:
            self._membership = None
            await clean_up(self._give_up_opening(dispatch))
            raise
        self._assignments.start()
        return self

    async def _give_up_opening(self, dispatch: Workers | Stream) -> None:
        await dispatch.close()
        await self._connections.close()

    def _new_membership(self, network: Network) -> Membership:
        return Membership(
            subject=self._subject,
            group=self._group,
            client=self._name or f"{socket.gethostname()}:{os.getpid()}",
            meta=MetaClient(network, self._addresses, timeout_ms=self._settings.call_timeout_ms),
            settings=self._settings,
            clock=self._clock,
            rng=self._rng,
            identity=self._draw_identity,
        )

    def _new_dispatch(self) -> Workers | Stream:
        if self._handler is None:
            return Stream(
                clock=self._clock,
                handover_ms=self._settings.handover_ms,
                check=self._home.check_not_elsewhere,
            )
        return Workers(
            self._handler,
            concurrency=self._settings.concurrency,
            handover_ms=self._settings.handover_ms,
            backoff=self._settings.handler_backoff,
            clock=self._clock,
            rng=self._rng,
            on_crash=self._fail,
            ordered=self._settings.strategy is ConsumeStrategy.EXCLUSIVE,
        )

    def _new_assignments(self, membership: Membership, dispatch: Workers | Stream) -> Assignments:
        return Assignments(
            subject=self._subject,
            group=self._group,
            settings=self._settings,
            clock=self._clock,
            rng=self._rng,
            connections=self._connections,
            membership=membership,
            dispatch=dispatch,
            fail=self._fail,
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """
        Hand everything over: finish handlers, flush acks, release, leave.

        Of a consumer without a handler: what was taken and not acked is given up at once, and comes again.
        In a child of the process in which it was opened it does nothing: that one is at work.

        Raises:
            OtherLoopError: it was opened in another event loop.
        """
        if not self._home.here:
            return
        self._home.check()
        # A cancellation ends only the waiting: handlers end, and partitions are handed over, all the same.
        await asyncio.shield(self._end())

    def _end(self) -> asyncio.Task[None]:
        """Begin to hand everything over, once: a signal, an error and the user may close it at the same time."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._close(), name="closing")
        return self._ending

    async def _close(self) -> None:
        membership, dispatch, assignments = self._membership, self._dispatch, self._assignments
        if membership is None or dispatch is None or assignments is None or not assignments.started:
            return
        if isinstance(dispatch, Stream):
            dispatch.leave()
        await assignments.close()
        await membership.stop()
        await dispatch.close()
        await self._connections.close()
        self._membership = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """End the consumer: `wait`, `run` and the iteration raise `error`, and its partitions go to others."""
        if self._ended is None or self._ended.done():
            return
        log.error("consumer of %s in group %s ends: %r", self._subject, self._group, error)
        self._ended.set_exception(error)
        self._ended.exception()
        if isinstance(self._dispatch, Stream):
            self._dispatch.fail(error)
        self._end()

    # ── what users call ──────────────────────────────────────────────────────────────────────────────
    async def run(self) -> None:
        """
        Consume until SIGTERM, SIGINT or `close`, hand everything over as `close` does, and return.

        Opens the consumer if it is not open.  A second signal goes to what handled it before: by default it ends the
        process at once.  Handlers of signals that stood before are called too, and stand alone again afterwards.  Only
        the main thread gets signals: in another one, `close` or a cancellation ends this.  Without a handler for
        messages, an iteration in another task ends: its body has `handover_ms` to ack what it has.

        Raises:
            KeylaneError: the consumer cannot be opened, or what ended it.
        """
        with StopSignals() as stop:
            if self._membership is not None:
                await self._run(stop.event)
                return
            async with self:
                await self._run(stop.event)

    async def _run(self, stop: asyncio.Event) -> None:
        ended = asyncio.create_task(self.wait(), name="wait for the end")
        stopped = asyncio.create_task(stop.wait(), name="wait for a signal")
        try:
            await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                log.info("consumer of %s in group %s hands over", self._subject, self._group)
                if isinstance(self._dispatch, Stream):
                    await self._dispatch.finish()
                await self.close()
            await ended
        finally:
            ended.cancel()
            stopped.cancel()

    async def wait(self) -> None:
        """
        Wait until the consumer is closed; raises what stopped it for good.

        Raises:
            ClosedError, ForkedError, OtherLoopError: not open, or not here.
        """
        self._home.check_not_elsewhere()
        if self._ended is None:
            raise ClosedError("the consumer is not open; use: async with Consumer(...)")
        await asyncio.shield(self._ended)

    async def suspend(self) -> None:
        """
        Hand everything over and get nothing until `resume`; the consumer stays a member of its group.

        What an iteration has and has not acked goes when it comes for the next message, be that after this returns.

        Raises:
            KeylaneError: the metaserver could not be told; go on as before, or try again.
        """
        self._home.check_not_elsewhere()
        if self._membership is None or self._assignments is None:
            raise ClosedError("the consumer is not open; use: async with Consumer(...)")
        await self._membership.suspend(True)
        hand_overs = self._assignments.hand_over_all()
        if hand_overs:
            # The body of an iteration may call this before it acks, so an iteration is waited for with a limit.
            limit_ms = self._settings.handover_ms + 2 * self._settings.call_timeout_ms
            iterated = isinstance(self._dispatch, Stream)
            await asyncio.wait(hand_overs, timeout=limit_ms / 1000 if iterated else None)

    async def resume(self) -> None:
        """
        Take part again after `suspend`.

        Raises:
            KeylaneError: the metaserver could not be told; still suspended, try again.
        """
        self._home.check_not_elsewhere()
        if self._membership is None:
            raise ClosedError("the consumer is not open; use: async with Consumer(...)")
        await self._membership.suspend(False)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        self._home.check_thread()
        if not isinstance(self._dispatch, Stream):
            raise ClosedError("not open, or it has a handler: messages go there")
        return await self._dispatch.next()

    @property
    def assignment(self) -> list[Assignment]:
        """The partitions owned now, by id; none while it is not open here."""
        if self._assignments is None or not self._home.here:
            return []
        return [
            Assignment(
                client.partition_id,
                client.token,
                client.outstanding,
                client.waiting_for,
                client.missed,
            )
            for client in self._assignments.clients
        ]
