"""The consumer for users: a handler or `async for`, exclusive partitions, and the order of each key
kept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import Any, Generic, Never, NoReturn, Self, SupportsIndex, TypeVar

from ..protocol.address import addresses_of
from ..protocol.codecs.codec import Codec, V, check_codec
from ..protocol.errors import (
    ClosedError,
    ConfigError,
    HandlerTypeError,
    InvalidRequestError,
    PartitionUnknownError,
    Reason,
    UsageError,
)
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.message import Message
from ..protocol.reading.instants import GroupBegin, group_start
from ..protocol.routing import ConsumeStrategy
from ..protocol.settings import range_problems, refuse_call, refuse_others
from ..rpc.client import MetaClient
from ..rpc.connections import Connections, clean_up, to_the_end
from ..rpc.environment import Environment, environment_of
from ..rpc.home import Home, LoopBoundClient
from ..rpc.race import Race, error_of, shield, start_ending
from .assignments import Assignments
from .broadcast import Broadcast, check_broadcast
from .delivery.alone_turn import AloneTurn
from .delivery.filter import filter_of
from .dispatches import DispatcherFactory, UserHandlers
from .handling.arrow_batch import ArrowBatch, check_arrow
from .handling.handlers import BatchHandler, Handler
from .handling.stream import NEXTS, Stream
from .handling.taken import ack_all, check_handed_out, count_try, listed, nack_all
from .handling.workers import Workers
from .log_names import consumer_name
from .manifest_file import begin_of
from .membership import Membership
from .pulling.progress import Position
from .pulling.pull_client import PullClient
from .pulling.pull_gate import PAUSED
from .rebalance import Rebalance, check_callbacks
from .settings import (
    OTHER_WORDS,
    RECORDS_MAX,
    AckMode,
    ConsumerSettings,
    FailurePolicy,
    inheriting,
    settings_with,
)
from .several import new_consumer_set

log = logging.getLogger("keylane.consumer")
H = TypeVar("H", bound=Callable[..., Any])
GETMANY_MS_MAX = 600_000


@dataclass(frozen=True, slots=True)
class Assignment:
    """One partition that a consumer owns."""

    partition_id: int
    fencing_token: int
    outstanding: int
    """The number of messages that are pulled and not yet handled."""
    waiting_for: str
    """A description, for people, of what pulling waits for: "messages", "handlers" or the text of
    an error.
    """
    missed: int = 0
    """The number of messages that retention by time removed before this consumer pulled them."""
    queue: int = 0
    """The number of its logic queue."""
    paused: bool = False
    """True between `pause` and `resume`."""


@dataclass(frozen=True, slots=True)
class Lag:
    """The distance of a consumer from the ends of its partitions, according to its last pulls."""

    messages: int
    """The number of messages from the cursors to the ends."""
    seconds: float
    """The age, in seconds, of the oldest message that is not acked, see `Position.lag_s`; 0.0 if
    everything is acked.
    """


class Consumer(LoopBoundClient, Generic[V]):
    """
    Handles the messages of a subject for a consumer group.

        async def handle(message: Message) -> None: ...

        await Consumer("127.0.0.1:7000", subject="flights", group="audit", handler=handle).run()

    Each partition belongs to one consumer of the group, unless the group is shared. `run` returns
    at SIGTERM or SIGINT, once everything is handed over. To do other work meanwhile, use `async
    with Consumer(...)`, with `run`, `wait` or neither inside; leaving the block hands everything
    over too.

    With a handler, a message is acked when its handler returns. If the handler raises, the message
    is tried again in place, and later messages of its key wait. A handler that does not want to
    ack raises `keylane.Retry`, with the seconds until the next try, or returns `keylane.NACK`; this
    is not an error, and logs no traceback.

    A `batch_handler` gets a list of messages of one partition, by offset, and all are acked when it
    returns.

    Without a handler: `async for message in consumer: ...; await message.ack()`, in one task;
    another task may take over once every message taken is acked, and gets a UsageError before that.
    A message is delivered only once all earlier ones of its key are acked; `await
    message.nack(after_s=5)` gives a message back, and it is delivered again. `getmany` gives
    several messages of a key together, and `batches` Arrow data. While the loop body runs,
    partitions with unacked messages stay assigned as long as heartbeats renew the lease. When the
    partition goes to another consumer, messages that were passed over without an ack are
    redelivered to that owner, `handover_ms` later at the earliest; closing the consumer redelivers
    them too.

    One object for several subjects: `consumer = Consumer(meta)`, then `@consumer.on("orders",
    group="billing")`.

    A message may be handled again after a crash or a lost lease; its `lease` lets a store refuse a
    late write.

    A consumer works in the event loop and the process in which it was opened, and refuses calls
    from elsewhere. A consumer made before a fork may be opened in each process; a closed consumer
    may be opened again, and joins again.

    Args:
        meta: `host:port` of a metaserver; for several metaservers, an iterable of texts or one text
            with commas.
        subject: an existing subject. Without a subject and a group, the consumer has those of
            `on`.
        group: the consumer group; its first consumer creates it.
        handler: an `async def`, called for many keys at once; or a `def`, called on the event loop,
            so it must be quick. An awaitable that it returns is awaited before the message is
            acked; other values are ignored.
        batch_handler: used instead of `handler`: it gets a list of up to `max_records` messages of
            one partition. A batch that fails is tried again once as a whole, then in halves, by
            key.
        codec: decodes values for `message.decode()`, for example JsonCodec(Order); None: `decode`
            returns bytes.
        start: where the group begins if it is new: "earliest", the default; "latest": it gets the
            messages that are sent once this consumer is open; an instant, as a datetime with a time
            zone, its text, or "-1h"; or "manifest:DIR": where the backfill in that folder ended, so
            that no message is handled twice and none is left out. An existing group ignores
            `start`.
        ack: "lingering", the default, or "each": the ack of a message is durable before the next of
            its key starts; or "before": before its own handler starts, so that it is handled at
            most once.
        on_failure: the treatment of a message that has failed `tries_max` times, or has ended its
            process. "block", the default of strict subjects: it is tried until it succeeds; "park":
            its key is set aside at the broker with all later messages, in order; "dead": only the
            message is set aside. "retry", the default of best_tried subjects: at the first failure
            the message alone is set aside, tried again after 5 s and then at growing intervals, and
            finally becomes a dead letter.
        tries_max: durable tries of a message before `on_failure` applies; 10 by default, 32 for
            "retry". Values that `keylane group set` stored override both.
        settings: everything else that can be set, such as `concurrency`, `tags`, `filter`,
            `threads` and `ttl_ms`; the arguments above take precedence.
        wait_s: seconds that the opening waits for a metaserver that is still starting; 0: it asks
            once.
        tls: the authority of the servers' certificates; None: KEYLANE_TLS_CA of the environment, or
            no TLS.
        token: the token for a cluster with access control; None: KEYLANE_TOKEN_FILE names its file,
            or KEYLANE_TOKEN has it.
    """

    def __init__(
        self,
        meta: str | Iterable[str],
        *,
        subject: str | None = None,
        group: str | None = None,
        handler: Handler[V] | None = None,
        batch_handler: BatchHandler[V] | None = None,
        codec: Codec[V] | None = None,
        start: GroupBegin | None = None,
        ack: AckMode | str | None = None,
        on_failure: FailurePolicy | str | None = None,
        tries_max: int | None = None,
        settings: ConsumerSettings | None = None,
        wait_s: float = 0,
        tls: TlsSettings | None = None,
        token: str | None = None,
        _environment: Environment | None = None,
        _alone: AloneTurn | None = None,
        **others: Never,
    ) -> None:
        """
        Make a consumer from the arguments that the class lists; `async with` or `run` opens it.

        Args:
            others: not accepted; a setting belongs in `settings`.

        Raises:
            TypeError: an argument that the class does not list; the error names the one to use
                instead.
            ConfigError, InvalidRequestError: an argument that cannot work.
            HandlerTypeError: the handler is a generator function, a class, or not for one message;
                also a TypeError.
        """
        refuse_others("Consumer", others, ConsumerSettings, OTHER_WORDS)
        self._handlers = UserHandlers(handler, batch_handler)
        given = settings_with(settings, ack=ack, on_failure=on_failure, tries_max=tries_max)
        check_callbacks(
            on_assigned=given.on_assigned, on_revoked=given.on_revoked, on_lost=given.on_lost
        )
        self._consumer_set = new_consumer_set(subject, group, self._handlers, given)
        self._filter = filter_of(given.tags, given.filter)
        if codec is not None:
            check_codec(codec)
        check_broadcast(group, start, given)
        self._handlers.check(given, alone=not self._consumer_set)
        self._settings = given
        self._addresses = addresses_of(meta)
        self._subject = subject or ""
        self._group = group or ""
        self._codec = codec
        self._begins_at = begin_of(start, subject=self._subject)
        self._given = _environment
        self._make_parts(_alone, wait_s, tls, token)

    def _make_parts(
        self, alone: AloneTurn | None, wait_s: float, tls: TlsSettings | None, token: str | None
    ) -> None:
        self._alone = alone or AloneTurn()
        network = None if self._given is None else self._given.network
        self._connections = Connections(
            network,
            timeout_ms=self._settings.call_timeout_ms,
            what="consumer",
            wait_s=wait_s,
            tls=tls,
            token=token,
        )
        self._home = self._connections.home
        self._dispatchers = DispatcherFactory(
            self._handlers, settings=self._settings, home=self._home, message_filter=self._filter
        )
        self._ended: asyncio.Future[None] | None = None
        self._closings = 0
        """The number of calls of `close`; an opening that began before one of them is ended."""
        self._letting = 0
        """The number of calls of `close` that let tasks of `run` take their first step: such a
        `run` was called before, and returns.
        """
        self._clear()

    def _clear(self) -> None:
        """Set the state of a new opening: it contains nothing from an earlier opening, and nothing
        that a fork copied.
        """
        self._environment = environment_of(self._given)
        self._clock = self._environment.clock
        self._start = group_start(self._begins_at, now_ms=self._clock.wall_ms())
        self._rng = self._environment.new_rng()
        self._membership: Membership | Broadcast | None = None
        self._dispatcher: Workers | Stream | None = None
        self._assignments: Assignments | None = None
        self._ending: asyncio.Task[None] | None = None
        """The task that hands everything over, also after an error that ended the consumer."""
        self._opened = asyncio.Event()
        """The event that is set when the opening has ended, whether it succeeded or failed."""

    def __repr__(self) -> str:
        where = ", ".join(self._addresses)
        if self._consumer_set is not None:
            count = len(self._consumer_set.members)
            return f"<Consumer of {count} at {where}, {self._consumer_set.state}>"
        return f"<Consumer of {self._whose} at {where}, {self._home.state}>"

    @property
    def _log_name(self) -> str:
        return consumer_name(self._subject, "" if self._settings.broadcast else self._group)

    @property
    def _whose(self) -> str:
        taken = ", broadcast," if self._settings.broadcast else f" in group {self._group}"
        return self._subject + taken

    # ── life ──────────────────────────────────────────────────────────────────────────────────────
    async def __aenter__(self) -> Self:
        """
        Join the group.

        Raises:
            NotSentError, OutcomeUnknownError: no metaserver answered within `wait_s`, or a broker
                did not report the position of a new group's `start`; open the consumer again.
            SubjectUnknownError: the subject was never created.
            ConflictError: the group has the other strategy.
            ConflictError: another member of the group has other tags, or another filter.
            BusyError, OverloadedError: a reset of the group is under way, or it has too many
                consumers.
            UsageError: the consumer is open, or was open before a fork.
            ConfigError: the system cannot start as many `threads`.
            ClosedError: `close` was called meanwhile.
        """
        if self._consumer_set is not None:
            await self._consumer_set.open()
            return self
        network = self._connections.open()
        self._clear()
        self._ended = asyncio.get_running_loop().create_future()
        meta = MetaClient(network, self._addresses, timeout_ms=self._settings.call_timeout_ms)
        membership = self._membership = self._new_membership(meta)
        dispatcher = self._dispatcher = self._dispatchers.create(
            environment=self._environment,
            rng=self._rng,
            on_crash=self._fail,
            client=self._client_name,
        )
        self._assignments = self._new_assignments(membership, dispatcher)
        self._connections.home.on_fork = self._assignments.on_fork
        try:
            self._dispatchers.start_threads()
            await self._connections.wait_for(meta, partial(membership.start, self._assignments))
            self._assignments.start()
        except BaseException as error:
            await clean_up(partial(self._give_up_opening, dispatcher, error))
            raise
        finally:
            self._opened.set()
        if not self._connections.wanted and self._ending is not None:
            await shield(self._ending)
            raise ClosedError("the consumer was closed while it was opened")
        return self

    async def _give_up_opening(self, dispatcher: Workers | Stream, why: BaseException) -> None:
        await dispatcher.close()
        if isinstance(self._membership, Membership):
            await self._membership.give_up(why)
        self._membership = None
        self._dispatchers.stop_threads()
        await self._connections.close()

    def _new_membership(self, meta: MetaClient) -> Membership | Broadcast:
        if self._settings.broadcast:
            return Broadcast(
                subject=self._subject,
                client=self._client_name,
                meta=meta,
                connections=self._connections,
                clock=self._clock,
            )
        return Membership(
            subject=self._subject,
            group=self._group,
            client=self._client_name,
            meta=meta,
            settings=self._settings,
            clock=self._clock,
            rng=self._rng,
            identity=self._environment.draw_identity,
            start=self._start,
            filter_text="" if self._filter is None else self._filter.text,
        )

    @property
    def _client_name(self) -> str:
        return self._settings.name or f"{socket.gethostname()}:{os.getpid()}"

    def _new_assignments(
        self, membership: Membership | Broadcast, dispatcher: Workers | Stream
    ) -> Assignments:
        settings = self._settings
        rebalance = Rebalance(
            limit_ms=settings.handover_ms,
            name=self._log_name,
            on_assigned=settings.on_assigned,
            on_revoked=settings.on_revoked,
            on_lost=settings.on_lost,
        )
        return Assignments(
            subject=self._subject,
            group=self._group,
            settings=settings,
            clock=self._clock,
            rng=self._rng,
            connections=self._connections,
            membership=membership,
            dispatcher=dispatcher,
            codec=self._codec,
            fail=self._fail,
            rebalance=rebalance,
            wanted=self._filter,
            alone=self._alone,
        )

    async def close(self) -> None:
        """
        Hand everything over: finish handlers, flush acks, release the partitions, and leave the
        group.

        From this call on no handler starts and no iteration gets a message; messages that were
        pulled and not handled go to other consumers. In a handler this returns at once: the
        running handlers, including the caller, have `handover_ms` to end, and their messages are
        acked when they return.

        Without a handler, messages that were taken but not acked are given up at once, and
        redelivered. In a child of the process that opened the consumer, this does nothing: the
        parent still consumes.

        Raises:
            UsageError: the consumer was opened in another event loop.
        """
        was_open, ending = self._home.here, self.begin_close()
        if not was_open and not self._is_forked:
            await self._let_runs_begin()
        if ending is not None:
            # A cancellation ends only the wait: handlers still end, and partitions are still handed
            # over.
            await shield(ending)

    def begin_close(self) -> asyncio.Task[None] | None:
        """Begin the work of `close`, and return at once a task that ends when everything is handed
        over; None if the caller must not wait.
        """
        self._closings += 1
        if self._consumer_set is not None:
            return self._consumer_set.begin_close()
        if not self._home.here:
            return None
        self._home.check()
        self._connections.wait_no_more()
        ending = self._end()
        return None if self._called_by_handler() else ending

    @property
    def _is_forked(self) -> bool:
        """Return True in a child of the process in which the consumer is open: no step of the
        parent's event loop may run there.
        """
        return any(part._home.state == "forked" for part in self._parts)

    async def _let_runs_begin(self) -> None:
        """Let tasks of `run` that were created earlier take their first step, in which they
        return.
        """
        self._letting += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._letting -= 1

    def _called_by_handler(self) -> bool:
        """Return True if the running task is that of a handler, for whose end a hand-over waits."""
        return isinstance(self._dispatcher, Workers) and self._dispatcher.runs(
            asyncio.current_task()
        )

    def _end(self) -> asyncio.Task[None]:
        """Begin to hand everything over, only once: a signal, an error and the user may close the
        consumer at the same time.
        """
        if self._ending is None:
            if self._assignments is not None and self._opened.is_set():
                self._assignments.stop()
            self._ending = start_ending(self._close(), name="closing")
        return self._ending

    async def _close(self) -> None:
        await self._opened.wait()  # it may be called while another task opens the consumer
        membership, dispatcher, assignments = self._membership, self._dispatcher, self._assignments
        if membership is None or dispatcher is None or assignments is None:
            return
        if isinstance(dispatcher, Stream):
            dispatcher.leave()
        try:
            await assignments.close()
            await membership.stop()
            assignments.drop_references()
        except asyncio.CancelledError:
            # The end of the event loop cancels everything that is left, and waits for it. The
            # consumer must leave, or the group waits for the ttl.
            await dispatcher.close()
            await membership.stop()
        await to_the_end(dispatcher.close)
        self._dispatchers.stop_threads()
        await to_the_end(self._connections.close)
        self._membership = self._assignments = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """End the consumer: `wait`, `run` and the iteration raise `error`, and its partitions go to
        other consumers.
        """
        if self._ended is None or self._ended.done():
            return
        log.error("%s ends: %r", self._log_name, error)
        self._ended.set_exception(error)
        self._ended.exception()
        if isinstance(self._dispatcher, Stream):
            self._dispatcher.fail(error)
        self._end()

    def on(self, subject: str, *, group: str | None = None, **options: Any) -> Callable[[H], H]:
        """
        Register a function that handles the messages of a subject, on a consumer made without one.

            consumer = Consumer("127.0.0.1:7000")

            @consumer.on("orders", group="billing", on_failure="park")
            async def bill(message: Message) -> None: ...

            await consumer.run()

        Each registration is a separate consumer with its own session; all are opened, run and
        closed together.

        Args:
            subject: an existing subject.
            group: the consumer group; a broadcast consumer has none.
            options: arguments of `Consumer`, such as `codec` or `settings`, which replace those of
                this consumer; settings without a name, a filter or callbacks have this consumer's.
                `batch=True`: the function is a batch handler.

        Raises:
            InvalidRequestError: this consumer has a subject of its own.
            UsageError: the consumer is open.
            ConfigError: the consumer already has a function for this subject and group.
            ConfigError, InvalidRequestError, HandlerTypeError: see `Consumer`.
        """
        if callable(subject):
            raise HandlerTypeError(
                '@consumer.on is called with a subject and a group: @consumer.on("orders", '
                'group="billing")'
            )
        consumer_set = self._consumer_set
        if consumer_set is None:
            raise InvalidRequestError(
                f"this consumer is of {self._subject}; Consumer(meta) without a subject takes "
                f"handlers of any"
            )
        known: dict[str, Any] = {
            "settings": self._settings,
            "wait_s": self._connections.wait_s,
            "tls": self._connections.tls,
            "token": self._connections.token,
            "start": self._begins_at,
            "codec": self._codec,
        } | options
        if isinstance(own := known["settings"], ConsumerSettings):
            known["settings"] = inheriting(own, self._settings)
        kind = "batch_handler" if known.pop("batch", False) else "handler"

        def add(handler: H) -> H:
            consumer_set.check_not_registered(subject, group)
            known[kind] = handler
            member: Consumer[Any] = Consumer(
                self._addresses,
                subject=subject,
                group=group,
                _environment=self._given,
                _alone=self._alone,
                **known,
            )
            consumer_set.add(member, subject, group)
            return handler

        return add

    # ── what users call ───────────────────────────────────────────────────────────────────────────
    async def run(self) -> None:
        """
        Consume until SIGTERM, SIGINT or `close`, hand everything over as `close` does, and return.

        The consumer is opened if it is not open. Signal handlers that were installed earlier are
        called too, and are restored afterwards. A second signal goes to them alone: by default it
        ends the process at once. Only the main thread gets signals: in another thread, `close` or
        a cancellation ends this. An iteration in another task ends: its body has `handover_ms` to
        ack its messages. If `close` is called before the first step of a task that runs this, the
        task returns at once; a call after that `close` opens the consumer again.

        Raises:
            HandlerTypeError: the consumer is not open and has no handler, so that its messages
                would reach no code.
            KeylaneError: the consumer cannot be opened, or an error ended it.
        """
        if self._letting:
            return
        if self._consumer_set is not None:
            await self._consumer_set.run()
            return
        with environment_of(self._given).stop_signals() as stop:
            if self._membership is not None:
                await self._run(stop.event)
                return
            if self._handlers.either is None:
                without = HandlerTypeError("run() needs a handler, and this consumer has none")
                without.hint = "Give it handler=, or iterate over it inside its `async with` block."
                raise without
            if await self._open_unless(stop.event):
                try:
                    await self._run(stop.event)
                finally:
                    await self.close()

    async def _open_unless(self, stop: asyncio.Event) -> bool:
        """Open the consumer, and return False if it is closed, or `stop` is set, while it waits for
        a metaserver that is still starting.
        """
        closings = self._closings
        if not self._connections.wait_s:
            await self._open_unless_closed(closings)
            return self._membership is not None
        async with Race() as race:
            opening = race.start(self._open_unless_closed(closings), name="open")
            race.start(stop.wait(), name="wait for a signal")
            await race.first()
            if opening.done():
                opening.result()
        return self._membership is not None

    async def _open_unless_closed(self, closings: int) -> None:
        """Open the consumer, unless `close` was called more often than `closings`, or is called
        meanwhile.
        """
        if closings == self._closings:
            try:
                await self.__aenter__()
            except ClosedError:
                if closings == self._closings:
                    raise

    async def _run(self, stop: asyncio.Event) -> None:
        async with Race() as race:
            ended = race.start(error_of(self.wait()), name="wait for the end")
            race.start(stop.wait(), name="wait for a signal")
            await race.first()
            if not ended.done():
                log.info("%s hands its partitions over", self._log_name)
                if isinstance(self._dispatcher, Stream):
                    await self._dispatcher.finish()
                await self.close()
            if (error := await ended) is not None:
                raise error

    async def wait(self) -> None:
        """
        Wait until the consumer is closed, and return at once if it is closed already. Signals are
        handled by `run` only.

        Raises:
            ClosedError: the consumer was never opened.
            UsageError: the consumer is open in another process or event loop.
            KeylaneError: an error ended the consumer; each call raises it until the consumer is
                opened again.
        """
        if self._consumer_set is not None:
            await self._consumer_set.wait()
            return
        self._home.check_not_elsewhere()
        if self._ended is None:
            raise ClosedError("the consumer was never opened")
        await shield(self._ended)

    async def suspend(self) -> None:
        """
        Hand everything over, and receive nothing until `resume`; the consumer stays a member of its
        group.

        Partitions whose messages are still in an iteration's body are handed over at its next step,
        which may happen after this has returned. In a handler this returns at once: the hand-over
        waits for that handler too.

        Raises:
            KeylaneError: the metaserver could not be notified; the consumer still consumes, so try
                again.
        """
        if self._consumer_set is not None:
            await self._consumer_set.suspend()
            return
        self._home.check_not_elsewhere()
        if self._membership is None or self._assignments is None:
            raise ClosedError("the consumer is not open")
        await self._membership.suspend(True)
        hand_overs = self._assignments.hand_over_all()
        if hand_overs and not self._called_by_handler():
            # The body of an iteration may call this before it acks, so the wait for an iteration is
            # limited.
            limit_ms = self._settings.handover_ms + 2 * self._settings.call_timeout_ms
            iterated = isinstance(self._dispatcher, Stream)
            await asyncio.wait(hand_overs, timeout=limit_ms / 1000 if iterated else None)

    async def resume(self, *partition_ids: int) -> None:
        """
        Take part again after `suspend`, and pull all partitions again after `pause`; with ids, pull
        only these partitions again.

        Raises:
            PartitionUnknownError: a partition is not assigned now, so it is not paused either;
                nothing has changed.
            KeylaneError: the metaserver could not be notified; the consumer is still suspended, so
                try again.
        """
        if partition_ids:
            self._steer(partition_ids, paused=False)
            return
        for part in self._parts:
            part._hold(tuple(part._clients), paused=False)
        if self._consumer_set is not None:
            await self._consumer_set.resume()
            return
        self._home.check_not_elsewhere()
        if self._membership is None:
            raise ClosedError("the consumer is not open")
        await self._membership.suspend(False)

    # ── its partitions ────────────────────────────────────────────────────────────────────────────
    @property
    def _parts(self) -> list[Consumer[Any]]:
        """Return the consumers of which this object consists."""
        if self._consumer_set is None:
            return [self]
        return [member for member in self._consumer_set.members if isinstance(member, Consumer)]

    @property
    def assignment(self) -> list[Assignment]:
        """Return the partitions that are owned now, by id; none while the consumer is not open
        here.
        """
        return [
            Assignment(
                client.partition_id,
                client.token,
                client.outstanding,
                client.waiting_for,
                client.missed,
                client.queue,
                client.paused,
            )
            for client in sorted(self._all_clients, key=attrgetter("partition_id"))
        ]

    @property
    def waiting_for(self) -> str:
        """Return a description for people, or "": who has suspended the consumer, so that it is
        granted no partitions, and the partitions whose messages it handles one at a time because
        they may have ended the process of an earlier owner.
        """
        texts = [
            part._assignments.waiting_for
            for part in self._parts
            if part._assignments is not None and part._home.here
        ]
        return "; ".join(dict.fromkeys(text for text in texts if text))

    async def pause(self, *partition_ids: int) -> None:
        """
        Receive no message of these partitions until `resume`, or until they are handed over;
        without ids, of all owned partitions.

        The partitions stay assigned. A failed message that is tried again, and messages that are
        running or in hand, are not held back.

        Raises:
            PartitionUnknownError: a partition is not assigned now; nothing has changed.
            InvalidRequestError: a list, a text or an `Assignment` was given in place of a partition
                id.
            ClosedError, UsageError: the consumer is not open here.
        """
        ids = partition_ids or tuple(client.partition_id for client in self._all_clients)
        self._steer(ids, paused=True)

    def _steer(self, partition_ids: tuple[int, ...], *, paused: bool) -> None:
        for part in self._parts:
            part._home.check()
        owned = {client.partition_id for client in self._all_clients}
        for partition_id in partition_ids:
            # An array also claims that it can be an index.
            if not (isinstance(partition_id, SupportsIndex) and isinstance(partition_id, Hashable)):
                raise InvalidRequestError(
                    "partitions are given by their ids, one by one, as pause(3, 5) or "
                    f"pause(*consumer.position), not {partition_id!r:.40}"
                )
            if partition_id not in owned:
                raise PartitionUnknownError(
                    f"partition {partition_id!r:.40} is not assigned to this consumer",
                    partition_id=partition_id,
                    subject=self._subject,
                )
        for part in self._parts:
            part._hold(partition_ids, paused=paused)

    def _hold(self, partition_ids: tuple[int, ...], *, paused: bool) -> None:
        """Pause or resume those of the partitions that this consumer owns."""
        clients, dispatcher = self._clients, self._dispatcher
        for partition_id in partition_ids:
            client = clients.get(partition_id)
            if client is None or dispatcher is None:
                continue
            if paused and not client.paused:
                client.gate.hold(PAUSED)
                dispatcher.pause(partition_id)
            elif not paused and client.paused:
                client.gate.let_go(PAUSED)
                dispatcher.resume(partition_id)

    @property
    def _all_clients(self) -> list[PullClient]:
        """Return the pull clients of all parts; two groups may each have one for the same
        partition.
        """
        return [client for part in self._parts for client in part._clients.values()]

    @property
    def _clients(self) -> dict[int, PullClient]:
        if self._assignments is None or not self._home.here:
            return {}
        return {client.partition_id: client for client in self._assignments.clients}

    @property
    def position(self) -> dict[int, Position]:
        """
        Return, by the id of each partition owned now, how far it is pulled and acked, and its lag.

        If handlers of `on` for two groups have the same partition, this is the position of the
        group that is further behind.
        """
        positions: dict[int, Position] = {}
        for client in self._all_clients:
            position, other = client.position, positions.get(client.partition_id)
            if other is None or position.cursor < other.cursor:
                positions[client.partition_id] = position
        return positions

    @property
    def lag(self) -> Lag:
        """Return the lag of all partitions that are owned now, together; a partition owned for two
        groups counts twice.
        """
        positions = [client.position for client in self._all_clients]
        return Lag(
            sum(position.lag_messages for position in positions),
            max((position.lag_s for position in positions), default=0.0),
        )

    @property
    def throttled_ms(self) -> int:
        """Return the milliseconds for which servers have delayed its calls because of a quota;
        waits that overlap are added up.
        """
        return sum(part._connections.throttled_ms for part in self._parts)

    def seek_to_time(self, *_where: object, **_to: object) -> NoReturn:
        """Raise UsageError, as `seek` does."""
        self.seek()

    def seek(self, *_where: object, **_to: object) -> NoReturn:
        """
        Raise UsageError: a group shares one progress, and a member that moved it alone would break
        the order for others.

        Raises:
            UsageError: always; the error explains how an operator resets the group.
        """
        if self._consumer_set is not None:
            raise UsageError(
                Reason.SEEK_IN_GROUP, "seek of a consumer: its cursor is moved by acks alone"
            )
        if not self._group:
            raise UsageError(
                Reason.SEEK_IN_GROUP,
                f"seek of a broadcast consumer of {self._subject}: it begins at the latest "
                f"message; a Reader begins anywhere",
            )
        raise UsageError(
            Reason.SEEK_IN_GROUP,
            f"seek of a consumer of {self._subject} in group {self._group}: its cursor is "
            f"moved by acks alone",
        )

    # ── messages without a handler ────────────────────────────────────────────────────────────────
    async def getmany(
        self, *, max_records: int | None = None, timeout_ms: int = 1_000
    ) -> list[Message[V]]:
        """
        Take several messages at once, even of one key; call `ack` when they are handled.

        Messages of a partition and a key are delivered in order. Until they are acked or given
        back, later messages of their keys are not delivered; several tasks may each work on the
        messages that they took.

        Args:
            max_records: 1 to 100_000; the default is the setting.
            timeout_ms: 0 to 600_000; milliseconds to wait for a first message.

        Returns:
            The messages that are available as soon as there is at least one; an empty list if none
            arrived in time.

        Raises:
            UsageError: another task waits for messages.
            UsageError: the consumer has delivered messages in another way since it was opened, for
                example by `async for`.
            ClosedError: the consumer is not open, was closed meanwhile, or has a handler.
            InvalidRequestError: an argument is out of its range; nothing was taken.
            KeylaneError: an error ended the consumer.
        """
        most = self._settings.max_records if max_records is None else max_records
        refuse_call(
            range_problems(
                {"max_records": most, "timeout_ms": timeout_ms},
                {"max_records": (1, RECORDS_MAX), "timeout_ms": (0, GETMANY_MS_MAX)},
            )
        )
        try:
            return await self._stream.take_many(most, timeout_ms)
        except StopAsyncIteration:
            raise ClosedError("the consumer was closed") from None

    def ack(self, messages: Iterable[Message[V]]) -> Coroutine[Any, Any, None]:
        """
        Ack messages that `getmany` or the iteration delivered, as `message.ack` does for one.

        Raises:
            InvalidRequestError: a message does not belong to this consumer, or was given back and
                will be delivered again; nothing is acked.
            LeaseLostError: other consumers have some of the messages now; the others are acked.
            ClosedError: a message was not delivered by any consumer.
        """
        acked = listed(messages)
        if not isinstance(self._dispatcher, Stream):
            check_handed_out(acked, self._home)
        return self._ack(acked)

    async def _ack(self, messages: list[Message[Any]]) -> None:
        if not (isinstance(self._dispatcher, Stream) and self._dispatcher.ack_hand(messages)):
            await ack_all(messages, self._home)

    def nack(
        self, messages: Iterable[Message[V]], *, after_s: float = 0
    ) -> Coroutine[Any, Any, None]:
        """
        Give messages back, as `message.nack` does for one; acked messages stay acked.

        With each message, later ones of its key that are in hand are given back too, so that none
        overtakes another.

        Raises:
            InvalidRequestError: a message does not belong to this consumer, or `after_s` is not a
                number of seconds up to a day; nothing is given back.
            LeaseLostError: other consumers have some of the messages now; the others are given
                back.
            ClosedError: a message was not delivered by any consumer.
        """
        given_back = listed(messages)
        if not isinstance(self._dispatcher, Stream):
            check_handed_out(given_back, self._home)
        return nack_all(given_back, self._home, after_s)

    def batches(self) -> AsyncIterator[ArrowBatch]:
        """
        Iterate over messages as Arrow record batches; this needs pyarrow and numpy.

        One batch of each partition is in hand at a time: the next one is delivered once it is
        acked.

        Raises:
            MissingExtraError: pyarrow or numpy is not installed.
            ConfigError: the group is shared, or `on_failure` is not "block".
            ClosedError, UsageError, KeylaneError: see `getmany`.
        """
        if self._settings.consume_strategy is ConsumeStrategy.SHARED:
            raise ConfigError("batches() are of exclusive groups; a shared one has no ranges")
        policy = self._settings.failure_policy
        if policy is not FailurePolicy.BLOCK:
            raise ConfigError(
                f"on_failure={policy.value!r} is of messages: what is wrong with one of a batch of "
                "Arrow data only its reader knows"
            )
        check_arrow()
        return BatchIteration(lambda: self._stream)

    def _note_error(self, error: BaseException | None) -> None:
        """Note that the block of the consumer ends with `error`, which may come from the message in
        hand.
        """
        if error is not None and isinstance(self._dispatcher, Stream) and self._home.here:
            count_try(self._dispatcher, error)

    def _put_back(self, taken: Message[Any] | list[Message[Any]] | ArrowBatch) -> None:
        """Take back messages that were given to a program that never saw them because it was
        interrupted; they are delivered next.
        """
        if isinstance(self._dispatcher, Stream):
            self._dispatcher.put_back(taken)

    @property
    def _stream(self) -> Stream:
        """Return the stream that gives messages to the program. Raises ClosedError."""
        if not isinstance(self._dispatcher, Stream):
            raise ClosedError(
                "the consumer is not open, or it has a handler that gets the messages"
            )
        return self._dispatcher

    def __aiter__(self) -> AsyncIterator[Message[V]]:
        return Iteration(self._home, lambda: self._stream)

    def __anext__(self) -> Coroutine[Any, Any, Message[V]]:
        """
        Return the next message, for a consumer without a handler.

        Raises:
            StopAsyncIteration: the consumer is closed.
            UsageError: another task waits for a message, or runs with a message that it has not
                acked.
            ClosedError: the consumer was never opened, or has a handler.
            UsageError: the consumer is open in another process or event loop.
            KeylaneError: an error ended the consumer.
        """
        self._home.check_thread()
        step: Coroutine[Any, Any, Message[Any]] = self._stream.next()
        return step


class BatchIteration:
    """
    The iteration over the Arrow batches of a consumer. It is not a generator, which a cancelled
    `anext` would end.

    Args:
        stream: returns the stream of the consumer; raises an error if there is none.
    """

    def __init__(self, stream: Callable[[], Stream]) -> None:
        self._stream = stream
        self._known: Stream | None = None
        """The stream that gives the batches; a consumer that was closed and opened again has
        another.
        """

    def __aiter__(self) -> BatchIteration:
        return self

    async def __anext__(self) -> ArrowBatch:
        """Return the next batch; see `Stream.take_arrow`."""
        if self._known is None:
            self._known = self._stream()
        return await self._known.take_arrow()


class Iteration:
    """
    The iteration over the messages of a consumer, one by one.

    Args:
        home: the home of the consumer.
        stream: returns the stream of the consumer; raises an error if there is none.
    """

    def __init__(self, home: Home, stream: Callable[[], Stream]) -> None:
        self._home = home
        self._stream = stream
        self._known: Stream | None = None
        """The stream that gave the last message; once it is closed, it gives no message alone."""

    def __aiter__(self) -> Iteration:
        return self

    async def __anext__(self) -> Message[Any]:
        """Return the next message; see `Stream.next`."""
        known = self._known
        if known is not None and get_ident() == self._home.thread:
            message = known.take_alone()
            if message is not None:
                return message
        self._known = stream = self._stream()
        self._home.check_thread()
        return await stream.next()


NEXTS.add(Iteration.__anext__.__code__)
