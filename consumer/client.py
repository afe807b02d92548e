"""The consumer users hold: a handler or `async for`, exclusive partitions, order kept per key."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, Self

from ..protocol.address import addresses_of
from ..protocol.codecs.codec import Codec, V, check_codec
from ..protocol.control import SHORT_TEXT_CHARS_MAX
from ..protocol.errors import ClosedError, ConfigError, HandlerTypeError
from ..protocol.ids import check_name
from ..protocol.message import Message
from ..protocol.routing import ConsumeStrategy
from ..rpc.client import MetaClient
from ..rpc.connections import Connections, clean_up
from ..rpc.environment import Environment
from ..rpc.home import Resident
from ..rpc.race import Race
from ..rpc.stop_signals import StopSignals
from .assignments import Assignments
from .handling.handlers import Handler, check_handler
from .handling.stream import Stream
from .handling.workers import Workers
from .membership import Membership
from .settings import AckMode, ConsumerSettings

log = logging.getLogger("keylane.consumer")
_UNSENDABLE = re.compile("[\0\ud800-\udfff]")
"""NUL, and halves of characters, which have no bytes in UTF-8."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One partition that a consumer owns."""

    partition_id: int
    fencing_token: int
    outstanding: int
    """Messages pulled and not yet handled."""
    waiting_for: str
    """For people: what pulling waits for, as "messages", "handlers" or the text of an error."""
    missed: int = 0
    """Messages that retention by time removed before this consumer pulled them."""


class Consumer(Resident, Generic[V]):
    """
    Handles the messages of a subject for a consumer group.

        async def handle(message: Message) -> None: ...

        await Consumer("127.0.0.1:7000", subject="flights", group="audit", handler=handle).run()

    Each partition belongs to one consumer of the group, unless the group is shared.  `run` returns at SIGTERM or SIGINT,
    once everything is handed over.  To do something else meanwhile: `async with Consumer(...)`, with `run`, `wait` or
    neither inside; leaving the block hands everything over too.

    With a handler, a message is acked when its handler returns.  If the handler raises, the message is tried again in
    place, and later messages of its key wait.  A handler that does not ack raises `keylane.Retry`, with the seconds until
    the next try, or returns `keylane.NACK`; that is no error, and has no traceback in the log.

    Without a handler: `async for message in consumer: ...; await message.ack()`, in one task; another task may take over
    once every message taken is acked, and gets an OtherTaskError before.  `await message.nack(after_s=5)` gives a message
    back: it comes again before any later message of its key.  While the loop body runs,
    partitions with unacked messages stay assigned as long as heartbeats renew the lease.  When the partition is wanted
    elsewhere, messages passed over without an ack are redelivered to its next owner, `handover_ms` later at the earliest.
    Closing the consumer lets every unacked message be redelivered.

    A message may be handled again after a crash or a lost lease; its `fencing_token` lets a store refuse a late write.

    A consumer works in the event loop and the process in which it was opened, and refuses calls from elsewhere.  A
    consumer made before a fork may be opened in each process; a closed consumer may be opened again, and joins anew.
    """

    def __init__(
        self,
        meta: str | Iterable[str],
        *,
        subject: str,
        group: str,
        handler: Handler[V] | None = None,
        codec: Codec[V] | None = None,
        concurrency: int | None = None,
        ttl_ms: int | None = None,
        name: str | None = None,
        consume_strategy: ConsumeStrategy | str | None = None,
        ack: AckMode | str | None = None,
        settings: ConsumerSettings | None = None,
        wait_s: float = 0,
        _environment: Environment | None = None,
    ) -> None:
        """
        Make a consumer; `async with` or `run` opens it.

        Args:
            meta: `host:port` of a metaserver; of several, an iterable of texts or one text with commas.
            subject: an existing subject.
            group: the consumer group; its first consumer creates it.
            handler: an `async def`, called for many keys at once; or a `def`, called on the event loop, so it must be
                quick.  An awaitable that it returns is awaited before the message is acked; other values are ignored.
            codec: decodes values for `message.decode()`, as JsonCodec(Order) does; None: that returns bytes.
            concurrency: handlers at once, each on another key; 16 by default.
            ttl_ms: a consumer silent for this long loses its partitions; at least 1000.
            name: for people, shown with the partitions; up to 512 characters; by default host and process id.
            consume_strategy: "exclusive", the default, or "shared": every consumer of the group takes messages of every
                partition, in no order, each at least once.  The group's first consumer decides.
            ack: "lingering", the default, or "each": the ack of a message is durable before the next of its key starts.
            settings: everything that can be set; the arguments above take precedence.
            wait_s: seconds for which opening waits for a metaserver that is still starting; 0: it asks once.

        Raises:
            ConfigError, InvalidNameError: an argument that cannot work.
            HandlerTypeError: the handler is a generator function, a class, or not for one message; also a TypeError.
        """
        _check_names(subject, group, name)
        _check_calls(handler, codec)
        self._settings = _settings_with(
            settings,
            concurrency=concurrency,
            ttl_ms=ttl_ms,
            consume_strategy=consume_strategy,
            ack=ack,
        )
        self._addresses = addresses_of(meta)
        self._subject, self._group, self._codec = subject, group, codec
        self._handler = handler
        self._name = name
        self._environment = _environment or Environment()
        network, call_ms = self._environment.network, self._settings.call_timeout_ms
        self._connections = Connections(network, timeout_ms=call_ms, what="consumer", wait_s=wait_s)
        self._home = self._connections.home
        self._clock = self._environment.clock
        self._ended: asyncio.Future[None] | None = None
        self._clear()

    def _clear(self) -> None:
        """Set the state of a new opening: nothing of an earlier opening is in it, and nothing that a fork copied."""
        self._rng = self._environment.new_rng()
        self._membership: Membership | None = None
        self._dispatch: Workers | Stream | None = None
        self._assignments: Assignments | None = None
        self._ending: asyncio.Task[None] | None = None
        """Hands everything over, also after an error that ended the consumer."""
        self._opened = asyncio.Event()
        """Set when the opening has ended, well or not."""

    def __repr__(self) -> str:
        where = ", ".join(self._addresses)
        return (
            f"<Consumer of {self._subject} in group {self._group} at {where}, {self._home.state}>"
        )

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────
    async def __aenter__(self) -> Self:
        """
        Join the group.

        Raises:
            NotSentError, OutcomeUnknownError: no metaserver answers, after `wait_s`; open it again.
            SubjectUnknownError: it was never created.
            GroupStrategyError: the group has the other strategy.
            GroupBusyError, OverloadedError: a reset of the group is under way, or it has too many consumers.
            AlreadyOpenError, ForkedError: the consumer is open, or was before a fork.
        """
        network = self._connections.open()
        self._clear()
        self._ended = asyncio.get_running_loop().create_future()
        meta = MetaClient(network, self._addresses, timeout_ms=self._settings.call_timeout_ms)
        membership = self._membership = self._new_membership(meta)
        dispatch = self._dispatch = self._new_dispatch()
        self._assignments = self._new_assignments(membership, dispatch)
        try:
            await self._connections.wait_for(meta)
            await membership.start(self._assignments)
            self._assignments.start()
        except BaseException:
            self._membership = None
            await clean_up(self._give_up_opening(dispatch))
            raise
        finally:
            self._opened.set()
        return self

    async def _give_up_opening(self, dispatch: Workers | Stream) -> None:
        await dispatch.close()
        await self._connections.close()

    def _new_membership(self, meta: MetaClient) -> Membership:
        return Membership(
            subject=self._subject,
            group=self._group,
            client=self._name or f"{socket.gethostname()}:{os.getpid()}",
            meta=meta,
            settings=self._settings,
            clock=self._clock,
            rng=self._rng,
            identity=self._environment.draw_identity,
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
            ordered=self._settings.consume_strategy is ConsumeStrategy.EXCLUSIVE,
            acks_each=self._settings.ack is AckMode.EACH,
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
            codec=self._codec,
            fail=self._fail,
        )

    async def close(self) -> None:
        """
        Hand everything over: finish handlers, flush acks, release, leave.

        From this call on no handler starts and no iteration gets a message; messages that were pulled and not handled
        go to other consumers.  In a handler this returns at once: the running handlers, also the one that called it,
        have `handover_ms` to end, and their messages are acked when they return.

        Without a handler, messages that were taken and not acked are given up at once, and redelivered.  In a child of
        the process that opened the consumer, this does nothing: the parent still consumes.

        Raises:
            OtherLoopError: the consumer was opened in another event loop.
        """
        if not self._home.here:
            return
        self._home.check()
        # A cancellation ends only the waiting: handlers end, and partitions are handed over, all the same.
        ending = self._end()
        if not self._called_by_handler():
            await asyncio.shield(ending)

    def _called_by_handler(self) -> bool:
        """True if the running task is that of a handler, whose end a hand-over waits for."""
        return isinstance(self._dispatch, Workers) and self._dispatch.runs(asyncio.current_task())

    def _end(self) -> asyncio.Task[None]:
        """Begin to hand everything over, once: a signal, an error and the user may close the consumer at the same time."""
        if self._ending is None:
            if self._assignments is not None and self._opened.is_set():
                self._assignments.stop()
            self._ending = asyncio.create_task(self._close(), name="closing")
        return self._ending

    async def _close(self) -> None:
        await self._opened.wait()  # it may be called while another task opens the consumer
        membership, dispatch, assignments = self._membership, self._dispatch, self._assignments
        if membership is None or dispatch is None or assignments is None:
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

        Opens the consumer if it is not open.  Signal handlers installed before are called too, and are restored
        afterwards.  A second signal goes to them alone: by default it ends the process at once.  Only the main thread
        gets signals: in another thread, `close` or a cancellation ends this.  An iteration in another task ends: its
        body has `handover_ms` to ack its messages.

        Raises:
            HandlerTypeError: the consumer is not open and has no handler, so that its messages would reach no code.
            KeylaneError: the consumer cannot be opened, or the error that ended it.
        """
        with StopSignals() as stop:
            if self._membership is not None:
                await self._run(stop.event)
                return
            if self._handler is None:
                raise HandlerTypeError(
                    "run() of a consumer without a handler: give it handler=, or iterate over it inside `async with`"
                )
            if await self._open_unless(stop.event):
                try:
                    await self._run(stop.event)
                finally:
                    await self.close()

    async def _open_unless(self, stop: asyncio.Event) -> bool:
        """Open the consumer; False if `stop` is set while it waits for a metaserver that is still starting."""
        if not self._connections.wait_s:
            await self.__aenter__()
            return True
        async with Race() as race:
            opening = race.start(self.__aenter__(), name="open")
            race.start(stop.wait(), name="wait for a signal")
            await race.first()
            if opening.done():
                opening.result()
        return self._membership is not None

    async def _run(self, stop: asyncio.Event) -> None:
        async with Race() as race:
            ended = race.start(self.wait(), name="wait for the end")
            race.start(stop.wait(), name="wait for a signal")
            await race.first()
            if not ended.done():
                log.info("consumer of %s in group %s hands over", self._subject, self._group)
                if isinstance(self._dispatch, Stream):
                    await self._dispatch.finish()
                await self.close()
            await ended

    async def wait(self) -> None:
        """
        Wait until the consumer is closed; returns at once if it is closed already.

        Raises:
            ClosedError: it was never opened.
            ForkedError, OtherLoopError: it is open elsewhere.
            KeylaneError: the error that ended the consumer, each time until it is opened again.
        """
        self._home.check_not_elsewhere()
        if self._ended is None:
            raise ClosedError("the consumer was never opened; use: async with Consumer(...)")
        await asyncio.shield(self._ended)

    async def suspend(self) -> None:
        """
        Hand everything over and get nothing until `resume`; the consumer stays a member of its group.

        Partitions whose messages are still in an iteration's body are handed over at its next step, which may happen
        after this has returned.  In a handler this returns at once: the hand-over waits for that handler too.

        Raises:
            KeylaneError: the metaserver could not be told; still consuming, try again.
        """
        self._home.check_not_elsewhere()
        if self._membership is None or self._assignments is None:
            raise ClosedError("the consumer is not open; use: async with Consumer(...)")
        await self._membership.suspend(True)
        hand_overs = self._assignments.hand_over_all()
        if hand_overs and not self._called_by_handler():
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

    def __aiter__(self) -> AsyncIterator[Message[V]]:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Message[V]]:
        """
        The next message, for a consumer without a handler.

        Raises:
            StopAsyncIteration: the consumer is closed.
            OtherTaskError: another task waits for a message, or runs with a message that it has not acked.
            ClosedError: the consumer was never opened, or has a handler.
            ForkedError, OtherLoopError: it is open elsewhere.
            KeylaneError: the error that ended the consumer.
        """
        self._home.check_thread()
        if not isinstance(self._dispatch, Stream):
            raise ClosedError(
                "the consumer is not open, or it has a handler that gets the messages"
            )
        step: Coroutine[Any, Any, Message[Any]] = self._dispatch.next()
        return step

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


def _settings_with(settings: ConsumerSettings | None, **given: Any) -> ConsumerSettings:
    """These settings, or the defaults, with the arguments that are not None in their place; raises ConfigError."""
    if settings is None:
        settings = ConsumerSettings()
    if not isinstance(settings, ConsumerSettings):
        raise ConfigError(f"settings must be ConsumerSettings, not {settings!r:.40}")
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


def _check_calls(handler: object, codec: object) -> None:
    """Raises HandlerTypeError, ConfigError: what will be called cannot be."""
    if handler is not None:
        check_handler(handler)
    if codec is not None:
        check_codec(codec)


def _check_names(subject: str, group: str, name: object) -> None:
    """Raises InvalidNameError, and ConfigError if a metaserver would not take `name` as that of a client."""
    check_name("subject", subject)
    check_name("consumer group", group)
    legal = name is None or (
        isinstance(name, str) and len(name) <= SHORT_TEXT_CHARS_MAX and not _UNSENDABLE.search(name)
    )
    if not legal:
        text = f"name must be text of at most {SHORT_TEXT_CHARS_MAX} characters, without NUL, not {name!r:.40}"
        raise ConfigError(text)
