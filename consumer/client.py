"""The consumer users hold: a handler or `async for`, exclusive partitions, order kept per key."""

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
from ..rpc.home import Home, Resident
from ..rpc.race import Race, error_of, shield, start_ending
from .assignments import Assignments
from .broadcast import Broadcast, check_broadcast
from .delivery.alone_turn import AloneTurn
from .delivery.filter import filter_of
from .dispatches import Calls, Dispatches
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
    settings_with,
)
from .several import several_if

log = logging.getLogger("keylane.consumer")
H = TypeVar("H", bound=Callable[..., Any])
GETMANY_MS_MAX = 600_000


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
    queue: int = 0
    """The number of its logic queue."""
    paused: bool = False
    """True between `pause` and `resume`."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a consumer is behind the ends of its partitions, as of its last pulls."""

    messages: int
    """Messages from the cursors to the ends."""
    seconds: float
    """The largest age of what is not acked, as of `Position.lag_s`; 0.0 if everything is acked."""


class Consumer(Resident, Generic[V]):
    """
    Handles the messages of a subject for a consumer group.

        async def handle(message: Message) -> None: ...

        await Consumer("127.0.0.1:7000", subject="flights", group="audit", handler=handle).run()

    Each partition belongs to one consumer of the group, unless the group is shared.  `run` returns
    at SIGTERM or SIGINT, once everything is handed over.  To do something else meanwhile: `async
    with Consumer(...)`, with `run`, `wait` or neither inside; leaving the block hands everything
    over too.

    With a handler, a message is acked when its handler returns.  If the handler raises, the message
    is tried again in place, and later messages of its key wait.  A handler that does not ack raises
    `keylane.Retry`, with the seconds until the next try, or returns `keylane.NACK`; that is no
    error, and has no traceback in the log.

    A `batch_handler` gets a list of messages of one partition, by offset, and all are acked when it
    returns.

    Without a handler: `async for message in consumer: ...; await message.ack()`, in one task;
    another task may take over once every message taken is acked, and gets an UsageError before.
    A message comes only once all earlier ones of its key are acked; `await message.nack(after_s=5)`
    gives one back, and it comes again.  `getmany` gives several messages of a key together, and
    `batches` Arrow data.  While the loop body runs, partitions with unacked messages stay assigned
    as long as heartbeats renew the lease.  When the partition is wanted elsewhere, messages passed
    over without an ack are redelivered to its next owner, `handover_ms` later at the earliest;
    closing the consumer redelivers them too.

    One object for several subjects: `consumer = Consumer(meta)`, then `@consumer.on("orders",
    group="billing")`.

    A message may be handled again after a crash or a lost lease; its `lease` lets a store refuse a
    late write.

    A consumer works in the event loop and the process in which it was opened, and refuses calls
    from elsewhere.  A consumer made before a fork may be opened in each process; a closed consumer
    may be opened again, and joins anew.

    Args:
        meta: `host:port` of a metaserver; of several, an iterable of texts or one text with commas.
        subject: an existing subject.  Without one, and without a group, the consumer has those of
            `on`.
        group: the consumer group; its first consumer creates it.
        handler: an `async def`, called for many keys at once; or a `def`, called on the event loop,
            so it must be quick.  An awaitable that it returns is awaited before the message is
            acked; other values are ignored.
        batch_handler: in place of `handler`: it gets a list of up to `max_records` messages of one
            partition. One that fails is tried again whole once, then in halves, by key.
        codec: decodes values for `message.decode()`, as JsonCodec(Order) does; None: that returns
            bytes.
        start: where the group begins if it is new: "earliest", the default; "latest": it gets what
            is sent once this consumer is open; an instant, as a datetime with a time zone, its
            text, or "-1h"; or "manifest:DIR": where the backfill in that folder ended, with nothing
            twice and nothing between.  A group that exists ignores it.
        ack: "lingering", the default, or "each": the ack of a message is durable before the next of
            its key starts; or "before": before its own handler starts, so that it is handled at
            most once.
        on_failure: what becomes of a message that has failed `tries_max` times, or has ended its
            process: "block", the default of strict subjects: it is tried on; "park": its key is set
            aside at the broker with all that follows, in order; "dead": the message alone is.
            "retry", the default of best_tried subjects: at the first failure the message alone is
            set aside, tried again in 5 s and then ever later, and is a dead letter in the end.
        tries_max: durable tries of a message before `on_failure` applies; 10 by default, 32 for
            "retry".  What `keylane group set` stored overrides both.
        settings: everything else that can be set, as `concurrency`, `tags`, `filter`, `threads` and
            `ttl_ms`; the arguments above take precedence.
        wait_s: seconds for which opening waits for a metaserver that is still starting; 0: it asks
            once.
        tls: the authority of the servers' certificates; None: KEYLANE_TLS_CA of the environment, or
            no TLS.
        token: of a cluster with access control; None: KEYLANE_TOKEN_FILE names its file, or
            KEYLANE_TOKEN has it.
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
        Make a consumer, of the arguments that the class lists; `async with` or `run` opens it.

        Args:
            others: none; what the class does not list is a setting.

        Raises:
            TypeError: an argument that the class does not list; it says what to give in its place.
            ConfigError, InvalidRequestError: an argument that cannot work.
            HandlerTypeError: the handler is a generator function, a class, or not for one message;
                also a TypeError.
        """
        refuse_others("Consumer", others, ConsumerSettings, OTHER_WORDS)
        self._calls = Calls(handler, batch_handler)
        given = settings_with(settings, ack=ack, on_failure=on_failure, tries_max=tries_max)
        check_callbacks(
            on_assigned=given.on_assigned, on_revoked=given.on_revoked, on_lost=given.on_lost
        )
        self._several = several_if(subject, group, self._calls, given)
        self._filter = filter_of(given.tags, given.filter)
        if codec is not None:
            check_codec(codec)
        check_broadcast(group, start, given)
        self._calls.check(given, alone=not self._several)
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
        self._dispatches = Dispatches(
            self._calls, settings=self._settings, home=self._home, wanted=self._filter
        )
        self._ended: asyncio.Future[None] | None = None
        self._closings = 0
        """Calls of `close`: an opening that began before one of them is ended."""
        self._letting = 0
        """Calls of `close` that let tasks of `run` take their first step: such a `run` was called
        before, and returns.
        """
        self._clear()

    def _clear(self) -> None:
        """Set the state of a new opening: nothing of an earlier opening is in it, and nothing that
        a fork copied.
        """
        self._environment = environment_of(self._given)
        self._clock = self._environment.clock
        self._start = group_start(self._begins_at, now_ms=self._clock.wall_ms())
        self._rng = self._environment.new_rng()
        self._membership: Membership | Broadcast | None = None
        self._dispatch: Workers | Stream | None = None
        self._assignments: Assignments | None = None
        self._ending: asyncio.Task[None] | None = None
        """Hands everything over, also after an error that ended the consumer."""
        self._opened = asyncio.Event()
        """Set when the opening has ended, well or not."""

    def __repr__(self) -> str:
        where = ", ".join(self._addresses)
        if self._several is not None:
            count = len(self._several.members)
            return f"<Consumer of {count} at {where}, {self._several.state}>"
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
            NotSentError, OutcomeUnknownError: no metaserver answers, after `wait_s`; or a new group
                has a `start`, and a broker does not say where that is; open it again.
            SubjectUnknownError: it was never created.
            ConflictError: the group has the other strategy.
            ConflictError: another member of the group has other tags, or another filter.
            BusyError, OverloadedError: a reset of the group is under way, or it has too many
                consumers.
            UsageError: the consumer is open, or was before a fork.
            ConfigError: the system does not give as many `threads`.
            ClosedError: `close` was called meanwhile.
        """
        if self._several is not None:
            await self._several.open()
            return self
        network = self._connections.open()
        self._clear()
        self._ended = asyncio.get_running_loop().create_future()
        meta = MetaClient(network, self._addresses, timeout_ms=self._settings.call_timeout_ms)
        membership = self._membership = self._new_membership(meta)
        dispatch = self._dispatch = self._dispatches.new(
            environment=self._environment,
            rng=self._rng,
            on_crash=self._fail,
            client=self._client_name,
        )
        self._assignments = self._new_assignments(membership, dispatch)
        self._connections.home.on_fork = self._assignments.forked
        try:
            self._dispatches.begin()
            await self._connections.wait_for(meta, partial(membership.start, self._assignments))
            self._assignments.start()
        except BaseException as error:
            await clean_up(partial(self._give_up_opening, dispatch, error))
            raise
        finally:
            self._opened.set()
        if not self._connections.wanted and self._ending is not None:
            await shield(self._ending)
            raise ClosedError("the consumer was closed while it was opened")
        return self

    async def _give_up_opening(self, dispatch: Workers | Stream, why: BaseException) -> None:
        await dispatch.close()
        if isinstance(self._membership, Membership):
            await self._membership.give_up(why)
        self._membership = None
        self._dispatches.end()
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
        self, membership: Membership | Broadcast, dispatch: Workers | Stream
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
            dispatch=dispatch,
            codec=self._codec,
            fail=self._fail,
            rebalance=rebalance,
            wanted=self._filter,
            alone=self._alone,
        )

    async def close(self) -> None:
        """
        Hand everything over: finish handlers, flush acks, release, leave.

        From this call on no handler starts and no iteration gets a message; messages that were
        pulled and not handled go to other consumers.  In a handler this returns at once: the
        running handlers, also the one that called it, have `handover_ms` to end, and their messages
        are acked when they return.

        Without a handler, messages that were taken and not acked are given up at once, and
        redelivered.  In a child of the process that opened the consumer, this does nothing: the
        parent still consumes.

        Raises:
            UsageError: the consumer was opened in another event loop.
        """
        was_open, ending = self._home.here, self.begin_close()
        if not was_open and not self._is_forked:
            await self._let_runs_begin()
        if ending is not None:
            # A cancellation ends only the waiting: handlers end, and partitions are handed over,
            # all the same.
            await shield(ending)

    def begin_close(self) -> asyncio.Task[None] | None:
        """Begin what `close` does, and return at once; the task ends when everything is handed
        over; None: do not wait.
        """
        self._closings += 1
        if self._several is not None:
            return self._several.begin_close()
        if not self._home.here:
            return None
        self._home.check()
        self._connections.wait_no_more()
        ending = self._end()
        return None if self._called_by_handler() else ending

    @property
    def _is_forked(self) -> bool:
        """True in a child of the process in which it is open: there no step of the parent's event
        loop may run.
        """
        return any(part._home.state == "forked" for part in self._parts)

    async def _let_runs_begin(self) -> None:
        """Let tasks of `run` that were made before take their first step, in which they return."""
        self._letting += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._letting -= 1

    def _called_by_handler(self) -> bool:
        """True if the running task is that of a handler, whose end a hand-over waits for."""
        return isinstance(self._dispatch, Workers) and self._dispatch.runs(asyncio.current_task())

    def _end(self) -> asyncio.Task[None]:
        """Begin to hand everything over, once: a signal, an error and the user may close the
        consumer at the same time.
        """
        if self._ending is None:
            if self._assignments is not None and self._opened.is_set():
                self._assignments.stop()
            self._ending = start_ending(self._close(), name="closing")
        return self._ending

    async def _close(self) -> None:
        await self._opened.wait()  # it may be called while another task opens the consumer
        membership, dispatch, assignments = self._membership, self._dispatch, self._assignments
        if membership is None or dispatch is None or assignments is None:
            return
        if isinstance(dispatch, Stream):
            dispatch.leave()
        try:
            await assignments.close()
            await membership.stop()
            assignments.let_go()
        except asyncio.CancelledError:
            # The end of the event loop cancels all that is left, and waits for it: leave, or the
            # group waits for the ttl.
            await dispatch.close()
            await membership.stop()
        await to_the_end(dispatch.close)
        self._dispatches.end()
        await to_the_end(self._connections.close)
        self._membership = self._assignments = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """End the consumer: `wait`, `run` and the iteration raise `error`, and its partitions go to
        others.
        """
        if self._ended is None or self._ended.done():
            return
        log.error("%s ends: %r", self._log_name, error)
        self._ended.set_exception(error)
        self._ended.exception()
        if isinstance(self._dispatch, Stream):
            self._dispatch.fail(error)
        self._end()

    def on(self, subject: str, *, group: str | None = None, **options: Any) -> Callable[[H], H]:
        """
        Have a function handle the messages of a subject; for a consumer made without one.

            consumer = Consumer("127.0.0.1:7000")

            @consumer.on("orders", group="billing", on_failure="park")
            async def bill(message: Message) -> None: ...

            await consumer.run()

        Each is a consumer of its own, with a session of its own; they are opened, run and closed
        together.

        Args:
            subject: an existing subject.
            group: the consumer group; none of a broadcast consumer.
            options: arguments of `Consumer`, in place of those that this one was made with, as
                `codec` or `settings`; `batch=True`: the function is a batch handler.

        Raises:
            InvalidRequestError: this consumer has a subject of its own.
            UsageError: it is open.
            ConfigError: it has a function for this subject and group.
            ConfigError, InvalidRequestError, HandlerTypeError: as of `Consumer`.
        """
        if callable(subject):
            raise HandlerTypeError(
                '@consumer.on is called with a subject and a group: @consumer.on("orders", '
                'group="billing")'
            )
        several = self._several
        if several is None:
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
        kind = "batch_handler" if known.pop("batch", False) else "handler"

        def add(handler: H) -> H:
            several.check_new(subject, group)
            known[kind] = handler
            member: Consumer[Any] = Consumer(
                self._addresses,
                subject=subject,
                group=group,
                _environment=self._given,
                _alone=self._alone,
                **known,
            )
            several.add(member, subject, group)
            return handler

        return add

    # ── what users call ───────────────────────────────────────────────────────────────────────────
    async def run(self) -> None:
        """
        Consume until SIGTERM, SIGINT or `close`, hand everything over as `close` does, and return.

        Opens the consumer if it is not open.  Signal handlers installed before are called too, and
        are restored afterwards.  A second signal goes to them alone: by default it ends the process
        at once.  Only the main thread gets signals: in another thread, `close` or a cancellation
        ends this.  An iteration in another task ends: its body has `handover_ms` to ack its
        messages.  As a task that `close` finds before its first step it returns at once; a call
        after that `close` opens the consumer again.

        Raises:
            HandlerTypeError: the consumer is not open and has no handler, so that its messages
                would reach no code.
            KeylaneError: the consumer cannot be opened, or the error that ended it.
        """
        if self._letting:
            return
        if self._several is not None:
            await self._several.run()
            return
        with environment_of(self._given).stop_signals() as stop:
            if self._membership is not None:
                await self._run(stop.event)
                return
            if self._calls.one is None:
                without = HandlerTypeError("run() needs a handler, and this consumer has none")
                without.hint = "Give it handler=, or iterate over it inside its `async with` block."
                raise without
            if await self._open_unless(stop.event):
                try:
                    await self._run(stop.event)
                finally:
                    await self.close()

    async def _open_unless(self, stop: asyncio.Event) -> bool:
        """Open the consumer; False if it is closed, or `stop` set, while it waits for a metaserver
        that is still starting.
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
        """Open the consumer, unless there were other calls of `close` than these, or there is one
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
                if isinstance(self._dispatch, Stream):
                    await self._dispatch.finish()
                await self.close()
            if (error := await ended) is not None:
                raise error

    async def wait(self) -> None:
        """
        Wait until the consumer is closed; returns at once if it is closed already.  It takes no
        signal: `run` does.

        Raises:
            ClosedError: it was never opened.
            UsageError: it is open elsewhere.
            KeylaneError: the error that ended the consumer, each time until it is opened again.
        """
        if self._several is not None:
            await self._several.wait()
            return
        self._home.check_not_elsewhere()
        if self._ended is None:
            raise ClosedError("the consumer was never opened")
        await shield(self._ended)

    async def suspend(self) -> None:
        """
        Hand everything over and get nothing until `resume`; the consumer stays a member of its
        group.

        Partitions whose messages are still in an iteration's body are handed over at its next step,
        which may happen after this has returned.  In a handler this returns at once: the hand-over
        waits for that handler too.

        Raises:
            KeylaneError: the metaserver could not be told; still consuming, try again.
        """
        if self._several is not None:
            await self._several.suspend()
            return
        self._home.check_not_elsewhere()
        if self._membership is None or self._assignments is None:
            raise ClosedError("the consumer is not open")
        await self._membership.suspend(True)
        hand_overs = self._assignments.hand_over_all()
        if hand_overs and not self._called_by_handler():
            # The body of an iteration may call this before it acks, so an iteration is waited for
            # with a limit.
            limit_ms = self._settings.handover_ms + 2 * self._settings.call_timeout_ms
            iterated = isinstance(self._dispatch, Stream)
            await asyncio.wait(hand_overs, timeout=limit_ms / 1000 if iterated else None)

    async def resume(self, *partition_ids: int) -> None:
        """
        Take part again after `suspend`, and pull all partitions again after `pause`; with ids, pull
        only these again.

        Raises:
            PartitionUnknownError: a partition is not assigned now, so that it is not paused either;
                nothing has changed.
            KeylaneError: the metaserver could not be told; still suspended, try again.
        """
        if partition_ids:
            self._steer(partition_ids, paused=False)
            return
        for part in self._parts:
            part._hold(tuple(part._clients), paused=False)
        if self._several is not None:
            await self._several.resume()
            return
        self._home.check_not_elsewhere()
        if self._membership is None:
            raise ClosedError("the consumer is not open")
        await self._membership.suspend(False)

    # ── its partitions ────────────────────────────────────────────────────────────────────────────
    @property
    def _parts(self) -> list[Consumer[Any]]:
        """The consumers that this object is made of."""
        if self._several is None:
            return [self]
        return [member for member in self._several.members if isinstance(member, Consumer)]

    @property
    def assignment(self) -> list[Assignment]:
        """The partitions owned now, by id; none while it is not open here."""
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
        """
        For people, else "": who has suspended it, so that it is granted no partitions; and those
        whose messages it handles one at a time, because they may have ended the process of an
        earlier owner.
        """
        texts = [
            part._assignments.waiting_for
            for part in self._parts
            if part._assignments is not None and part._home.here
        ]
        return "; ".join(dict.fromkeys(text for text in texts if text))

    async def pause(self, *partition_ids: int) -> None:
        """
        Get no message of these partitions until `resume`, or until they are handed over; without
        ids, of all that are owned.

        They stay assigned.  A message that failed, and is tried again, and messages that run or are
        in hand are not held.

        Raises:
            PartitionUnknownError: a partition is not assigned now; nothing has changed.
            InvalidRequestError: a list, a text or an `Assignment` in place of the id of a
                partition.
            ClosedError, UsageError: the consumer is not open here.
        """
        ids = partition_ids or tuple(client.partition_id for client in self._all_clients)
        self._steer(ids, paused=True)

    def _steer(self, partition_ids: tuple[int, ...], *, paused: bool) -> None:
        for part in self._parts:
            part._home.check()
        owned = {client.partition_id for client in self._all_clients}
        for partition_id in partition_ids:
            # An array says that it can be an index.
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
        """Pause or resume those of the partitions that this one owns."""
        clients, dispatch = self._clients, self._dispatch
        for partition_id in partition_ids:
            client = clients.get(partition_id)
            if client is None or dispatch is None:
                continue
            if paused and not client.paused:
                client.gate.hold(PAUSED)
                dispatch.pause(partition_id)
            elif not paused and client.paused:
                client.gate.let_go(PAUSED)
                dispatch.resume(partition_id)

    @property
    def _all_clients(self) -> list[PullClient]:
        """Those of all parts; two groups may each have one of the same partition."""
        return [client for part in self._parts for client in part._clients.values()]

    @property
    def _clients(self) -> dict[int, PullClient]:
        if self._assignments is None or not self._home.here:
            return {}
        return {client.partition_id: client for client in self._assignments.clients}

    @property
    def position(self) -> dict[int, Position]:
        """
        By id of each partition that is owned now: what is pulled and acked of it, and its lag.

        Where handlers of `on` for two groups have the same partition, that of the group that is
        further behind.
        """
        positions: dict[int, Position] = {}
        for client in self._all_clients:
            position, other = client.position, positions.get(client.partition_id)
            if other is None or position.cursor < other.cursor:
                positions[client.partition_id] = position
        return positions

    @property
    def lag(self) -> Lag:
        """The lag of all partitions that are owned now, together; those of two groups count
        twice.
        """
        positions = [client.position for client in self._all_clients]
        return Lag(
            sum(position.lag_messages for position in positions),
            max((position.lag_s for position in positions), default=0.0),
        )

    @property
    def throttled_ms(self) -> int:
        """For how long servers have let its calls wait for a quota; waits at the same time count
        together.
        """
        return sum(part._connections.throttled_ms for part in self._parts)

    def seek_to_time(self, *_where: object, **_to: object) -> NoReturn:
        """Refused, as `seek`.  Raises UsageError."""
        self.seek()

    def seek(self, *_where: object, **_to: object) -> NoReturn:
        """
        Refused: the progress of a group is one, and a member that moved it alone would break the
        order of others.

        Raises:
            UsageError: always; it says how an operator resets the group.
        """
        if self._several is not None:
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
        Take several messages at once, also of one key; `ack` takes them when they are handled.

        Messages of a partition and a key come in their order.  Until they are acked or given back,
        later messages of their keys do not come; several tasks may each work on what they took.

        Args:
            max_records: 1 to 100_000; by default that of the settings.
            timeout_ms: 0 to 600_000; milliseconds to wait for a first message.

        Returns:
            What is there, as soon as there is one message; none if none came in time.

        Raises:
            UsageError: another task waits for messages.
            UsageError: the consumer gave messages in another way since it was opened, as by
                `async for`.
            ClosedError: the consumer is not open, was closed meanwhile, or has a handler.
            InvalidRequestError: an argument out of its range; nothing was taken.
            KeylaneError: the error that ended the consumer.
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
        Ack messages that `getmany` or the iteration gave, as `message.ack` does for one.

        Raises:
            InvalidRequestError: a message is not this consumer's, or was given back and comes
                again; nothing is acked.
            LeaseLostError: other consumers have some of the messages now; the others are acked.
            ClosedError: no consumer handed a message out.
        """
        acked = listed(messages)
        if not isinstance(self._dispatch, Stream):
            check_handed_out(acked, self._home)
        return self._ack(acked)

    async def _ack(self, messages: list[Message[Any]]) -> None:
        if not (isinstance(self._dispatch, Stream) and self._dispatch.ack_hand(messages)):
            await ack_all(messages, self._home)

    def nack(
        self, messages: Iterable[Message[V]], *, after_s: float = 0
    ) -> Coroutine[Any, Any, None]:
        """
        Give messages back, as `message.nack` does for one; those that are acked stay so.

        With each message, later ones of its key that are in hand are given back too: none comes
        past another.

        Raises:
            InvalidRequestError: a message is not this consumer's, or `after_s` is no number of
                seconds up to a day; nothing is given back.
            LeaseLostError: other consumers have some of the messages now; the others are given
                back.
            ClosedError: no consumer handed a message out.
        """
        given_back = listed(messages)
        if not isinstance(self._dispatch, Stream):
            check_handed_out(given_back, self._home)
        return nack_all(given_back, self._home, after_s)

    def batches(self) -> AsyncIterator[ArrowBatch]:
        """
        Iterate over messages as Arrow record batches; needs pyarrow and numpy.

        Of each partition one batch at a time is in hand: the next one comes once it is acked.

        Raises:
            ConfigError: pyarrow is not installed, the group is shared, or `on_failure` is not
                "block".
            ClosedError, UsageError, KeylaneError: as of `getmany`.
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
        """Note that the block of the consumer ends, with `error`: it may be that of the message in
        hand.
        """
        if error is not None and isinstance(self._dispatch, Stream) and self._home.here:
            count_try(self._dispatch, error)

    def _put_back(self, taken: Message[Any] | list[Message[Any]] | ArrowBatch) -> None:
        """Take back what was given to a program that never saw it, as it was interrupted: it comes
        again next.
        """
        if isinstance(self._dispatch, Stream):
            self._dispatch.put_back(taken)

    @property
    def _stream(self) -> Stream:
        """Gives messages to the program.  Raises ClosedError."""
        if not isinstance(self._dispatch, Stream):
            raise ClosedError(
                "the consumer is not open, or it has a handler that gets the messages"
            )
        return self._dispatch

    def __aiter__(self) -> AsyncIterator[Message[V]]:
        return Iteration(self._home, lambda: self._stream)

    def __anext__(self) -> Coroutine[Any, Any, Message[V]]:
        """
        The next message, for a consumer without a handler.

        Raises:
            StopAsyncIteration: the consumer is closed.
            UsageError: another task waits for a message, or runs with a message that it has not
                acked.
            ClosedError: the consumer was never opened, or has a handler.
            UsageError: it is open elsewhere.
            KeylaneError: the error that ended the consumer.
        """
        self._home.check_thread()
        step: Coroutine[Any, Any, Message[Any]] = self._stream.next()
        return step


class BatchIteration:
    """
    The Arrow batches of a consumer.  It is no generator, which a cancelled `anext` would end.

    Args:
        stream: of the consumer; raises an error if there is none.
    """

    def __init__(self, stream: Callable[[], Stream]) -> None:
        self._stream = stream
        self._known: Stream | None = None
        """The one that gives the batches: a consumer that was closed and opened again has
        another.
        """

    def __aiter__(self) -> BatchIteration:
        return self

    async def __anext__(self) -> ArrowBatch:
        """As `Stream.take_arrow`."""
        if self._known is None:
            self._known = self._stream()
        return await self._known.take_arrow()


class Iteration:
    """
    The messages of a consumer, one by one.

    Args:
        home: of the consumer.
        stream: of the consumer; raises an error if there is none.
    """

    def __init__(self, home: Home, stream: Callable[[], Stream]) -> None:
        self._home = home
        self._stream = stream
        self._known: Stream | None = None
        """The one that gave the last message; once it is closed it gives none alone."""

    def __aiter__(self) -> Iteration:
        return self

    async def __anext__(self) -> Message[Any]:
        """As `Stream.next`."""
        known = self._known
        if known is not None and get_ident() == self._home.thread:
            message = known.take_alone()
            if message is not None:
                return message
        self._known = stream = self._stream()
        self._home.check_thread()
        return await stream.next()


NEXTS.add(Iteration.__anext__.__code__)
