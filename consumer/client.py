"""The public `Consumer`: calls a handler or is iterated with `async for`, and preserves the order
of each key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from operator import attrgetter
from threading import get_ident
from typing import Any, Generic, Never, NoReturn, Self, SupportsIndex, TypeVar

from ..protocol.address import parse_addresses
from ..protocol.codecs.codec import Codec, V, check_codec
from ..protocol.errors import (
    ClosedError,
    ConfigError,
    HandlerTypeError,
    InvalidRequestError,
    PartitionUnknownError,
    Reason,
    UnreachableError,
    UsageError,
)
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.message import Message
from ..protocol.reading.instants import GroupStartOption, group_start
from ..protocol.routing import ConsumeStrategy
from ..protocol.settings import (
    check_no_call_problems,
    names_missing_address,
    range_problems,
    refuse_unknown_arguments,
)
from ..protocol.text import counted
from ..rpc.client import MetaClient
from ..rpc.connections import Connections
from ..rpc.environment import Environment, environment_of, process_name
from ..rpc.loop_binding import LoopBinding, LoopBoundClient
from ..rpc.network import Network
from ..rpc.race import Race, error_of, shield, start_task
from .arguments import check_broadcast, check_callbacks, check_names, resolve_start
from .dispatch.arrow import ArrowBatch, check_arrow
from .dispatch.dispatchers import DispatcherFactory, UserHandlers
from .dispatch.handlers import BatchHandler, Handler
from .dispatch.loop import NEXT_CODES, LoopDispatch
from .dispatch.workers import WorkerPool
from .filter import build_filter
from .group.assignments import Assignments
from .handed_out import check_handed_out, to_list
from .opening import ConsumerOpening, ConsumerOptions
from .progress import Position
from .running import print_ready_line
from .session_shell import PAUSED, SessionShell, SuspectLock
from .settings import (
    ARGUMENT_HINTS,
    METHOD_HINTS,
    RECORDS_MAX,
    AckMode,
    ConsumerSettings,
    FailurePolicy,
    inherit_settings,
    merge_settings,
)

log = logging.getLogger("keylane.consumer")
H = TypeVar("H", bound=Callable[..., Any])
GETMANY_MS_MAX = 600_000


@dataclass(frozen=True, slots=True)
class Assignment:
    """A partition that a consumer owns."""

    partition_id: int
    fencing_token: int
    outstanding: int
    """The number of messages that are pulled but not yet handled."""
    waiting_for: str
    """A text for users that says why nothing is pulled: "messages", "handlers" or the text of an
    error.
    """
    missed: int = 0
    """The number of messages that time-based retention removed before this consumer pulled them."""
    queue: int = 0
    """The number of the partition's logic queue."""
    paused: bool = False
    """True between `pause` and `resume`."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a consumer is behind the ends of its partitions, as of its last pulls."""

    messages: int
    """The number of messages from the cursors to the ends."""
    seconds: float
    """The age, in seconds, of the oldest unacked message, see `Position.lag_s`; 0.0 if everything
    is acked.
    """


class Consumer(LoopBoundClient, Generic[V]):
    """
    Handles the messages of a subject for a consumer group.

        async def handle(message: Message) -> None: ...

        await Consumer("127.0.0.1:7000", subject="orders", group="billing", handler=handle).run()

    Each partition belongs to one consumer of the group, unless the group is shared. `run` returns
    at SIGTERM or SIGINT, once all partitions are handed over. To do other work in the meantime, use
    `async with Consumer(...)`, with or without `run` or `wait` inside; leaving the block also hands
    over all partitions.

    With a handler, a message is acked when its handler returns. If the handler raises, the message
    is retried in place, and later messages of its key wait. To reject a message without an error or
    a traceback in the log, a handler raises `keylane.Retry`, with the number of seconds until the
    next attempt, or returns `keylane.NACK`.

    A `batch_handler` gets a list of messages of one partition, sorted by offset; all of them are
    acked when it returns.

    Without a handler: `async for message in consumer: ...; await message.ack()`, in one task;
    another task may take over once every delivered message is acked, and gets a UsageError before
    that. A message is delivered only after all earlier ones of its key are acked. `await
    message.nack(after_s=5)` gives a message back, to be redelivered later. `getmany` returns
    several messages, even of one key, and `batches` yields Arrow data. While the loop body runs,
    partitions with unacked messages stay assigned as long as heartbeats renew the lease. When a
    partition moves to another consumer, messages that the loop has moved past without an ack are
    redelivered there, after `handover_ms` at the earliest; closing the consumer redelivers them
    too.

    One object can consume several subjects: `consumer = Consumer(meta)`, then
    `@consumer.on("orders", group="billing")`.

    A message may be handled again after a crash or a lost lease; with its `lease`, a store can
    refuse a late write.

    A consumer works in the process and event loop in which it was opened, and refuses calls from
    others. A consumer created before a fork may be opened in each process. A closed consumer may be
    opened again, and then joins again.

    Args:
        meta: `host:port` of a metaserver; for several metaservers, an iterable of strings or one
            comma-separated string.
        subject: an existing subject. Without a subject and a group, the consumer uses those
            registered with `on`.
        group: the consumer group; its first consumer creates it.
        handler: an `async def`, called concurrently for many keys; or a `def`, called on the event
            loop, so it must be fast. An awaitable that it returns is awaited before the message is
            acked; other values are ignored.
        batch_handler: used instead of `handler`: it gets a list of up to `max_records` messages of
            one partition. A failed batch is retried once as a whole, then in halves, by key.
        codec: decodes values for `message.decode()`, for example JsonCodec(Order); None: `decode`
            returns bytes.
        start: where the group begins if it is new: "earliest", the default; "latest": it gets the
            messages that are sent once this consumer is open; a point in time, as a timezone-aware
            datetime, its ISO text, or "-1h"; or "manifest:DIR": where the backfill in that folder
            ended, so that no message is handled twice or skipped. An existing group ignores
            `start`.
        ack: "lingering", the default, or "each": the ack of a message is durable before the next of
            its key starts; or "before": before its own handler starts, so that it is handled at
            most once.
        on_failure: the treatment of a message that has failed `tries_max` times, or has killed its
            process. "block", the default of strict subjects: it is retried until it succeeds;
            "park": its key is set aside at the broker with all later messages, in order; "dead":
            only the message is set aside. "retry", the default of best_tried subjects: at the first
            failure the message alone is set aside, retried after 5 s and then at growing intervals,
            and finally becomes a dead letter.
        tries_max: the number of recorded attempts of a message before `on_failure` applies; 10 by
            default, 32 for "retry". Values that `keylane group set` stored override both.
        settings: all other settings, such as `concurrency`, `tags`, `filter`,
            `threads` and `ttl_ms`; the arguments above take precedence.
        wait_s: how many seconds opening waits for a metaserver that is still starting; 0: one
            attempt.
        tls: the certificate authority of the servers; None: the environment variable
            KEYLANE_TLS_CA, or no TLS.
        token: the token for a cluster with access control; None: from the file that
            KEYLANE_TOKEN_FILE names, or from KEYLANE_TOKEN.
    """

    _method_hints = METHOD_HINTS

    @names_missing_address("Consumer", ConsumerSettings, ARGUMENT_HINTS)
    def __init__(
        self,
        meta: str | Iterable[str],
        *,
        subject: str | None = None,
        group: str | None = None,
        handler: Handler[V] | None = None,
        batch_handler: BatchHandler[V] | None = None,
        codec: Codec[V] | None = None,
        start: GroupStartOption | None = None,
        ack: AckMode | str | None = None,
        on_failure: FailurePolicy | str | None = None,
        tries_max: int | None = None,
        settings: ConsumerSettings | None = None,
        wait_s: float = 0,
        tls: TlsSettings | None = None,
        token: str | None = None,
        _environment: Environment | None = None,
        _alone: SuspectLock | None = None,
        **others: Never,
    ) -> None:
        """
        Create a consumer; `async with` or `run` opens it. The class documents the arguments.

        Args:
            others: rejected; settings belong in `settings`.

        Raises:
            TypeError: the argument is unknown; the error names the one to use instead.
            ConfigError, InvalidRequestError: an argument is invalid.
            HandlerTypeError: the handler is a generator function or a class, or does not take one
                message; also a TypeError.
        """
        refuse_unknown_arguments("Consumer", others, ConsumerSettings, ARGUMENT_HINTS)
        handlers = UserHandlers(handler, batch_handler)
        merged = merge_settings(settings, ack=ack, on_failure=on_failure, tries_max=tries_max)
        check_callbacks(
            on_assigned=merged.on_assigned, on_revoked=merged.on_revoked, on_lost=merged.on_lost
        )
        check_names(subject, group, merged, has_handler=handlers.any_handler is not None)
        self._consumer_set = ConsumerSet() if subject is None and group is None else None
        message_filter = build_filter(merged.tags, merged.filter)
        if codec is not None:
            check_codec(codec)
        check_broadcast(group, start, merged)
        handlers.check(merged, alone=not self._consumer_set)
        self._addresses = parse_addresses(meta)
        self._options = ConsumerOptions(
            subject=subject or "",
            group=group or "",
            handlers=handlers,
            settings=merged,
            codec=codec,
            message_filter=message_filter,
            start=resolve_start(start, subject=subject or ""),
            alone=_alone or SuspectLock(),
        )
        self._environment = _environment
        self._connections = Connections(
            None if _environment is None else _environment.network,
            timeout_ms=merged.call_timeout_ms,
            what="consumer",
            wait_s=wait_s,
            tls=tls,
            token=token,
        )
        self._loop_binding = self._connections.loop_binding
        self._dispatchers = DispatcherFactory(
            handlers,
            settings=merged,
            loop_binding=self._loop_binding,
            message_filter=message_filter,
        )
        # An invalid start is an error here, and not at the opening.
        group_start(self._options.start, now_ms=environment_of(_environment).clock.wall_ms())
        self._last_opening: ConsumerOpening | None = None
        """The current opening, or the last one; None before the first."""
        self._on_program_end: Callable[[], None] = lambda: None
        """Called when a handler has ended the program."""
        self._close_count = 0
        """The number of `close` calls; an opening that began before the latest one is cancelled."""
        self._closes_yielding = 0
        """The number of `close` calls that are letting tasks of `run` take their first step: these
        tasks were created before the call, and return at once.
        """

    def __repr__(self) -> str:
        addresses = ", ".join(self._addresses)
        if self._consumer_set is not None:
            count = len(self._consumer_set.members)
            return f"<Consumer of {count} at {addresses}, {self._consumer_set.state}>"
        suffix = f" in group {self._options.group}" if self._options.group else ", broadcast,"
        subject = self._options.subject + suffix
        return f"<Consumer of {subject} at {addresses}, {self._loop_binding.state}>"

    # ── life ──────────────────────────────────────────────────────────────────────────────────────
    async def __aenter__(self) -> Self:
        """
        Join the group.

        Raises:
            NotSentError, OutcomeUnknownError: no metaserver replied within `wait_s`, or a broker
                did not report the offset of a new group's `start`; open the consumer again.
            SubjectUnknownError: the subject was never created.
            ConflictError: the group has another assignment strategy, or its members have other tags
                or another filter.
            BusyError, OverloadedError: the group is being reset, or has too many consumers.
            UsageError: the consumer is already open, or was open before a fork.
            ConfigError: the system cannot start as many `threads` as requested.
            ClosedError: `close` was called in the meantime.
        """
        if self._consumer_set is not None:
            await self._consumer_set.open()
            return self
        opening = self._last_opening = self._new_opening(self._connections.open())
        await opening.start()
        if not self._connections.wanted and opening.closing is not None:
            await shield(opening.closing)
            raise ClosedError("the consumer was closed while it was opened")
        return self

    def _new_opening(self, network: Network) -> ConsumerOpening:
        settings = self._options.settings
        return ConsumerOpening(
            self._options,
            settings.name or process_name(),
            MetaClient(network, self._addresses, timeout_ms=settings.call_timeout_ms),
            self._connections,
            self._dispatchers,
            environment_of(self._environment),
            on_program_end=self._on_program_end,
        )

    async def close(self) -> None:
        """
        Hand over all partitions and leave the group: finish handlers, flush acks, and release.

        After this call no handler starts and no iteration gets a message; messages that were pulled
        but not handled go to other consumers. Called in a handler, this returns at once: the
        running handlers, including the caller, have `handover_ms` to end, and their messages are
        acked when they return. A handler must not await it in another task, as with
        `asyncio.create_task` or, on Python 3.11, `asyncio.wait_for`: that task waits for the
        handler, which is cancelled after `handover_ms`.

        Without a handler, messages that were delivered but not acked are redelivered to other
        consumers. In a child of the process that opened the consumer this does nothing: the parent
        still consumes.

        Raises:
            UsageError: the consumer was opened in another event loop.
        """
        was_open, close_task = self._loop_binding.is_open_here, self.begin_close()
        if not was_open and not self._is_forked:
            await self._let_runs_return()
        if close_task is not None:
            # Cancelling the caller only stops the wait, not the hand-over.
            await shield(close_task)

    def begin_close(self) -> asyncio.Task[None] | None:
        """Start closing, and immediately return a task that ends when all partitions are handed
        over; None if the caller must not wait for it.
        """
        self._close_count += 1
        if self._consumer_set is not None:
            return self._consumer_set.begin_close()
        opening = self._last_opening
        if opening is None or not self._loop_binding.is_open_here:
            return None
        self._loop_binding.check()
        self._connections.request_close()
        closing = opening.close()
        return None if opening.is_called_by_handler() else closing

    @property
    def _is_forked(self) -> bool:
        """True in a forked child of the process that opened the consumer, where the parent's event
        loop must not run.
        """
        return any(member._loop_binding.state == "forked" for member in self._members)

    async def _let_runs_return(self) -> None:
        """Let earlier `run` tasks take their first step, in which they return."""
        self._closes_yielding += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._closes_yielding -= 1

    def _begin_no_more(self) -> None:
        """Let no handler of a member begin, because one of them has ended the program."""
        for member in self._members:
            opening = member._last_opening
            if opening is not None and isinstance(opening.dispatcher, WorkerPool):
                opening.dispatcher.begin_no_more()

    def on(self, subject: str, *, group: str | None = None, **options: Any) -> Callable[[H], H]:
        """
        Register a handler for a subject, on a consumer that was created without one.

            consumer = Consumer("127.0.0.1:7000")

            @consumer.on("orders", group="billing", on_failure="park")
            async def bill(message: Message) -> None: ...

            await consumer.run()

        Each registration is a separate consumer with its own session; all are opened, run and
        closed together.

        Args:
            subject: an existing subject.
            group: the consumer group; a broadcast consumer has none.
            options: arguments of `Consumer`, such as `codec` or `settings`, that override those of
                this consumer. Settings without a name, filter or callbacks inherit those of this
                consumer. `batch=True`: the function is a batch handler.

        Raises:
            InvalidRequestError: this consumer was created with a subject; also as in `Consumer`.
            UsageError: the consumer is open.
            ConfigError: the subject and group already have a handler; also as in `Consumer`.
            HandlerTypeError: see `Consumer`.
        """
        if callable(subject):
            raise HandlerTypeError(
                '@consumer.on needs a subject and a group: @consumer.on("orders", group="billing")'
            )
        consumer_set = self._consumer_set
        if consumer_set is None:
            raise InvalidRequestError(
                f"this consumer has the subject {self._options.subject}; create one without a "
                f"subject, Consumer(meta), to register handlers"
            )
        arguments: dict[str, Any] = {
            "settings": self._options.settings,
            "wait_s": self._connections.wait_s,
            "tls": self._connections.tls,
            "token": self._connections.token,
            "start": self._options.start,
            "codec": self._options.codec,
        } | options
        if isinstance(settings := arguments["settings"], ConsumerSettings):
            arguments["settings"] = inherit_settings(settings, self._options.settings)
        kind = "batch_handler" if arguments.pop("batch", False) else "handler"

        def add(handler: H) -> H:
            consumer_set.check_not_registered(subject, group)
            arguments[kind] = handler
            member: Consumer[Any] = Consumer(
                self._addresses,
                subject=subject,
                group=group,
                _environment=self._environment,
                _alone=self._options.alone,
                **arguments,
            )
            member._on_program_end = self._begin_no_more
            consumer_set.add(member, subject, group)
            return handler

        return add

    # ── what users call ───────────────────────────────────────────────────────────────────────────
    async def run(self) -> None:
        """
        Consume until SIGTERM, SIGINT or `close`, then hand over all partitions and return.

        Opens the consumer if it is not open. Signal handlers that were installed earlier are called
        too, and are restored afterwards. If running handlers delay the return by more than a
        second, a log line names them. A second signal goes only to the earlier handlers: by default
        it kills the process. Only the main thread receives signals; in another thread, call `close`
        or cancel the task. An iteration in another task ends, and its body has `handover_ms` to ack
        its messages. If `close` is called before the task of this call takes its first step, the
        task returns at once; a later `run` opens the consumer again.

        Raises:
            HandlerTypeError: the consumer is not open and has no handler for its messages.
            KeylaneError: opening failed, or an error ended the consumer.
        """
        if self._closes_yielding:
            return
        if self._consumer_set is not None:
            await self._consumer_set.run()
            return
        with environment_of(self._environment).stop_signals() as stop:
            if self._current is not None:
                await self._run(stop.event)
                return
            if self._options.handlers.any_handler is None:
                error = HandlerTypeError("run() needs a handler, and this consumer has none")
                error.hint = "Pass handler=, or iterate over it inside its `async with` block."
                raise error
            try:
                is_open = await self._open_unless(stop.event)
            except UnreachableError as error:
                raise error.with_traceback(None) from None  # a script ends with this error
            if is_open:
                try:
                    await self._run(stop.event)
                finally:
                    await self.close()

    async def _open_unless(self, stop: asyncio.Event) -> bool:
        """Open the consumer. Return False if it is closed or `stop` is set while it waits for a
        metaserver that is still starting.
        """
        close_count = self._close_count
        if not self._connections.wait_s:
            await self._open_unless_closed(close_count)
            return self._current is not None
        async with Race() as race:
            opening = race.start(self._open_unless_closed(close_count), name="open")
            race.start(stop.wait(), name="wait for a signal")
            await race.first()
            if opening.done():
                opening.result()
        return self._current is not None

    async def _open_unless_closed(self, close_count: int) -> None:
        """Open the consumer, unless `close` is called in the meantime or has been called more than
        `close_count` times already.
        """
        if close_count == self._close_count:
            try:
                await self.__aenter__()
            except ClosedError:
                if close_count == self._close_count:
                    raise

    async def _run(self, stop: asyncio.Event) -> None:
        opening = self._current
        assert opening is not None
        print_ready_line(opening.name)
        async with Race() as race:
            has_ended = race.start(error_of(self.wait()), name="wait for the end")
            race.start(stop.wait(), name="wait for a signal")
            await race.first()
            if not has_ended.done():
                log.info("%s hands over its partitions", opening.name)
                if isinstance(opening.dispatcher, LoopDispatch):
                    with opening.logging_a_long_wait():
                        await opening.dispatcher.finish()
                await self.close()
            if (error := await has_ended) is not None:
                raise error

    async def wait(self) -> None:
        """
        Wait until the consumer is closed. Unlike `run`, this does not handle signals.

        Raises:
            ClosedError: the consumer was never opened.
            UsageError: the consumer is open in another process or event loop.
            KeylaneError: an error ended the consumer; each call raises it until the consumer is
                opened again.
        """
        if self._consumer_set is not None:
            await self._consumer_set.wait()
            return
        self._loop_binding.check_not_elsewhere()
        if self._last_opening is None:
            raise ClosedError("the consumer was never opened")
        await shield(self._last_opening.ended)

    async def suspend(self) -> None:
        """
        Hand over all partitions and receive nothing until `resume`. The consumer stays a member of
        its group.

        Partitions with messages still in an iteration's body are handed over at its next step,
        possibly after this call has returned. Called in a handler, or in the task that has taken
        messages and not acked them, this returns at once, because the hand-over waits for them.

        Raises:
            KeylaneError: the metaserver could not be reached; the consumer is still consuming, so
                try again.
        """
        if self._consumer_set is not None:
            await self._consumer_set.suspend()
            return
        self._loop_binding.check_not_elsewhere()
        opening = self._current
        if opening is None or opening.membership is None or opening.assignments is None:
            raise ClosedError("the consumer is not open")
        assignments = opening.assignments
        await opening.membership.suspend(True)
        # The consumer may have closed since, which has handed everything over.
        hand_overs = assignments.hand_over_all()
        if hand_overs and not opening.is_called_with_messages():
            # Another task may have messages and wait for this one, so limit the wait.
            settings = self._options.settings
            limit_ms = settings.handover_ms + 2 * settings.call_timeout_ms
            iterated = isinstance(opening.dispatcher, LoopDispatch)
            await asyncio.wait(hand_overs, timeout=limit_ms / 1000 if iterated else None)

    async def resume(self, *partition_ids: int) -> None:
        """
        Undo `suspend`, and `pause` for all partitions; with ids, only undo `pause` for those
        partitions.

        Raises:
            PartitionUnknownError: a partition is not assigned, so it is not paused; nothing has
                changed.
            KeylaneError: the metaserver could not be reached; the consumer is still suspended, so
                try again.
        """
        if partition_ids:
            self._set_paused(partition_ids, paused=False)
            return
        for member in self._members:
            member._set_own_paused(tuple(member._clients), paused=False)
        if self._consumer_set is not None:
            await self._consumer_set.resume()
            return
        self._loop_binding.check_not_elsewhere()
        opening = self._current
        if opening is None or opening.membership is None:
            raise ClosedError("the consumer is not open")
        await opening.membership.suspend(False)

    # ── its partitions ────────────────────────────────────────────────────────────────────────────
    @property
    def _members(self) -> list[Consumer[Any]]:
        """The consumers registered with `on`, or this one."""
        return [self] if self._consumer_set is None else self._consumer_set.members

    @property
    def assignment(self) -> list[Assignment]:
        """The partitions owned now, sorted by id; empty if the consumer is not open in this process
        and event loop.
        """
        return [
            Assignment(
                client.partition_id,
                client.state.tenure.lease.token,
                client.state.intake.held,
                client.waiting_for,
                client.state.offsets.missed,
                client.delivery.queue,
                client.gate.is_paused,
            )
            for client in sorted(self._all_clients, key=attrgetter("partition_id"))
        ]

    @property
    def waiting_for(self) -> str:
        """A text for users: who has suspended the consumer, and which partitions' messages it
        handles one at a time, because they may have killed the process of an earlier owner; "" if
        neither applies.
        """
        texts = [
            assignments.waiting_for
            for member in self._members
            if (assignments := member._assignments) is not None
        ]
        return "; ".join(dict.fromkeys(text for text in texts if text))

    async def pause(self, *partition_ids: int) -> None:
        """
        Receive no messages from these partitions, or from all owned ones, until `resume` or a
        hand-over.

        The partitions stay assigned. Messages in a handler or in hand are not held back; failed
        ones are retried after `resume`.

        Raises:
            PartitionUnknownError: a partition is not assigned; nothing has changed.
            InvalidRequestError: an argument is not a partition id, for example a list.
            ClosedError, UsageError: the consumer is not open here.
        """
        ids = partition_ids or tuple(client.partition_id for client in self._all_clients)
        self._set_paused(ids, paused=True)

    def _set_paused(self, partition_ids: tuple[int, ...], *, paused: bool) -> None:
        for member in self._members:
            member._loop_binding.check()
        owned = {client.partition_id for client in self._all_clients}
        for partition_id in partition_ids:
            # numpy arrays are SupportsIndex too, but not hashable.
            if not (isinstance(partition_id, SupportsIndex) and isinstance(partition_id, Hashable)):
                raise InvalidRequestError(
                    "pass partition ids as separate arguments, as in pause(3, 5) or "
                    f"pause(*consumer.position), not {partition_id!r:.40}"
                )
            if partition_id not in owned:
                raise PartitionUnknownError(
                    f"partition {partition_id!r:.40} is not assigned to this consumer",
                    partition_id=partition_id,
                    subject=self._options.subject,
                )
        for member in self._members:
            member._set_own_paused(partition_ids, paused=paused)

    def _set_own_paused(self, partition_ids: tuple[int, ...], *, paused: bool) -> None:
        """Pause or resume the given partitions that this consumer owns."""
        clients, opening = self._clients, self._last_opening
        for partition_id in partition_ids:
            client = clients.get(partition_id)
            if client is None or opening is None:
                continue
            if paused and not client.gate.is_paused:
                client.gate.add(PAUSED)
                if isinstance(opening.dispatcher, LoopDispatch):
                    opening.dispatcher.pause()
            elif not paused and client.gate.is_paused:
                client.gate.remove(PAUSED)

    @property
    def _all_clients(self) -> list[SessionShell]:
        """The shells of all members; two groups may each have one for the same partition."""
        return [client for member in self._members for client in member._clients.values()]

    @property
    def _current(self) -> ConsumerOpening | None:
        """The opening, unless it has ended."""
        opening = self._last_opening
        return None if opening is None or opening.membership is None else opening

    @property
    def _assignments(self) -> Assignments | None:
        """The partitions, if the consumer is open in this process and event loop."""
        opening = self._last_opening if self._loop_binding.is_open_here else None
        return None if opening is None else opening.assignments

    @property
    def _clients(self) -> dict[int, SessionShell]:
        clients = [] if self._assignments is None else self._assignments.clients
        return {client.partition_id: client for client in clients}

    @property
    def position(self) -> dict[int, Position]:
        """
        How far each owned partition is pulled and acked, and its lag, by partition id.

        If two groups registered with `on` own the same partition, this is the position of the group
        that is further behind.
        """
        positions: dict[int, Position] = {}
        for client in self._all_clients:
            position, other = client.position, positions.get(client.partition_id)
            if other is None or position.cursor < other.cursor:
                positions[client.partition_id] = position
        return positions

    @property
    def lag(self) -> Lag:
        """The total lag of the partitions owned now; a partition owned for two groups counts
        twice.
        """
        positions = [client.position for client in self._all_clients]
        return Lag(
            sum(position.lag_messages for position in positions),
            max((position.lag_s for position in positions), default=0.0),
        )

    @property
    def throttled_ms(self) -> int:
        """The time, in milliseconds, by which servers have delayed this consumer's calls because of
        a quota; overlapping delays are added up.
        """
        return sum(member._connections.throttled_ms for member in self._members)

    def seek_to_time(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Always raise UsageError; see `seek`."""
        self.seek()

    def seek(self, *_args: object, **_kwargs: object) -> NoReturn:
        """
        Always raise UsageError: the members of a group share one cursor, and moving it would
        break the order for the other members.

        Raises:
            UsageError: always; the error explains how an operator resets the group.
        """
        if self._consumer_set is not None:
            raise UsageError(Reason.SEEK_IN_GROUP, "seek on a consumer: only acks move its cursor")
        subject, group = self._options.subject, self._options.group
        if not group:
            raise UsageError(
                Reason.SEEK_IN_GROUP,
                f"seek on a broadcast consumer of {subject}: it begins at the latest "
                f"message; a Reader begins anywhere",
            )
        raise UsageError(
            Reason.SEEK_IN_GROUP,
            f"seek on a consumer of {subject} in group {group}: only acks move its cursor",
            subject=subject,
            group=group,
        )

    # ── messages without a handler ────────────────────────────────────────────────────────────────
    async def getmany(
        self, *, max_records: int | None = None, timeout_ms: int = 1_000
    ) -> list[Message[V]]:
        """
        Take several messages at once, even of the same key; call `ack` once they are handled.

        Messages of a partition and a key are delivered in order. Later messages of their keys are
        delivered only after these are acked or nacked. Several tasks may work concurrently, each on
        the messages it took.

        Args:
            max_records: 1 to 100_000; default: the setting `max_records`.
            timeout_ms: 0 to 600_000; how many milliseconds to wait for the first message.

        Returns:
            All messages available as soon as there is at least one; an empty list if none arrived
            in time.

        Raises:
            UsageError: another task waits for messages, or the consumer has a handler or has
                delivered messages in another way since it was opened, for example by `async for`.
            ClosedError: the consumer is not open, or was closed in the meantime.
            InvalidRequestError: an argument is out of range; nothing was taken.
            KeylaneError: an error ended the consumer.
        """
        limit = self._options.settings.max_records if max_records is None else max_records
        check_no_call_problems(
            range_problems(
                {"max_records": limit, "timeout_ms": timeout_ms},
                {"max_records": (1, RECORDS_MAX), "timeout_ms": (0, GETMANY_MS_MAX)},
            )
        )
        try:
            messages: list[Message[V]] = await self._loop.take_many(limit, timeout_ms)
        except StopAsyncIteration:
            raise ClosedError("the consumer was closed") from None
        return messages

    def ack(self, messages: Iterable[Message[V]]) -> Coroutine[Any, Any, None]:
        """
        Ack messages that `getmany` or the iteration delivered, as `message.ack` does for one.

        Raises:
            InvalidRequestError: a message does not belong to this consumer, or was nacked and will
                be delivered again; nothing is acked.
            LeaseLostError: other consumers now own some of the messages; the others are acked.
            ClosedError: a message was not delivered by any consumer.
        """
        to_ack = to_list(messages)
        if (loop := self._last_loop) is None:
            check_handed_out(to_ack, self._loop_binding)
            return _do_nothing()
        return loop.ack_all(to_ack, self._loop_binding)

    def nack(
        self, messages: Iterable[Message[V]], *, after_s: float = 0
    ) -> Coroutine[Any, Any, None]:
        """
        Nack messages, as `message.nack` does for one; acked messages stay acked.

        To preserve the order, later messages of the same keys that were delivered are nacked too.

        Raises:
            InvalidRequestError: a message does not belong to this consumer, or `after_s` is not a
                number of seconds up to a day; nothing is nacked.
            LeaseLostError: other consumers now own some of the messages; the others are nacked.
            ClosedError: a message was not delivered by any consumer.
        """
        to_nack = to_list(messages)
        if (loop := self._last_loop) is None:
            check_handed_out(to_nack, self._loop_binding)
            return _do_nothing()
        return loop.nack_all(to_nack, self._loop_binding, after_s)

    def batches(self) -> AsyncIterator[ArrowBatch]:
        """
        Iterate over messages as Arrow record batches; this needs pyarrow and numpy.

        Each partition has at most one unacked batch at a time.

        Raises:
            MissingExtraError: pyarrow or numpy is not installed.
            ConfigError: the group is shared, or `on_failure` is not "block".
            ClosedError, UsageError, KeylaneError: see `getmany`.
        """
        if self._options.settings.consume_strategy is ConsumeStrategy.SHARED:
            raise ConfigError("batches() need an exclusive group; a shared one does not ack ranges")
        policy = self._options.settings.failure_policy
        if policy is not FailurePolicy.BLOCK:
            raise ConfigError(
                f"on_failure={policy.value!r} needs single messages: only the program knows which "
                "message of an Arrow batch failed"
            )
        check_arrow()
        return BatchIteration(lambda: self._column_loop)

    def _note_error(self, error: BaseException | None) -> None:
        """Count a failed attempt if the consumer's `async with` block ends with an error, which the
        message in hand may have caused.
        """
        if error is None or not self._loop_binding.is_open_here:
            return
        if self._last_loop is not None:
            self._last_loop.count_failed_attempt(error)

    def _put_back(self, messages: Message[Any] | list[Message[Any]] | ArrowBatch) -> None:
        """Requeue messages that an interrupted call never returned, so that they are delivered
        next.
        """
        if self._last_loop is not None:
            self._last_loop.put_back(messages)

    @property
    def _last_loop(self) -> LoopDispatch | None:
        """What delivers messages to the program, or did so until the consumer was closed; None if
        nothing has.
        """
        dispatcher = None if self._last_opening is None else self._last_opening.dispatcher
        return dispatcher if isinstance(dispatcher, LoopDispatch) else None

    @property
    def _loop(self) -> LoopDispatch:
        """The same. Raises UsageError or ClosedError in place of None."""
        if (loop := self._last_loop) is not None:
            return loop
        if any(member._options.handlers.any_handler is not None for member in self._members):
            raise UsageError(
                Reason.MIXED_USE, "the messages of this consumer are taken by its handler"
            )
        raise ClosedError("the consumer is not open")

    @property
    def _column_loop(self) -> LoopDispatch:
        """What delivers Arrow batches to the program. When they are first asked for, other sessions
        take the place of those that have prepared messages. Raises ClosedError and UsageError.
        """
        loop = self._loop
        if not loop.by_column:
            loop.claim_columns()
            if self._assignments is None:
                raise ClosedError("the consumer was closed")
            self._assignments.replace_sessions()
        return loop

    def __aiter__(self) -> AsyncIterator[Message[V]]:
        return Iteration(self._loop_binding, lambda: self._loop)

    def __anext__(self) -> Coroutine[Any, Any, Message[V]]:
        """
        Return the next message, for a consumer without a handler.

        Raises:
            StopAsyncIteration: the consumer is closed.
            UsageError: another task waits for a message or has one that is not acked, the consumer
                has a handler, or it is open in another process or event loop.
            ClosedError: the consumer was never opened.
            KeylaneError: an error ended the consumer.
        """
        self._loop_binding.check_thread()
        step: Coroutine[Any, Any, Message[Any]] = self._loop.next()
        return step


async def _do_nothing() -> None:
    """Replaces an ack of no messages."""


class ConsumerSet:
    """Opens, runs and closes its members together; an error in one closes all."""

    def __init__(self) -> None:
        self.members: list[Consumer[Any]] = []
        self._registered: set[tuple[str, str]] = set()
        """The (subject, group) pairs that have a member."""
        self._open = False
        self._close_count = 0
        """The number of calls to `begin_close`."""

    @property
    def state(self) -> str:
        """The state, for `repr`: "open" or "closed"."""
        return "open" if self._open else "closed"

    def check_not_registered(self, subject: str, group: str | None) -> None:
        """Raise ConfigError if the subject and group already have a member. A broadcast consumer
        has no group, so it is always accepted.
        """
        if group is not None and (subject, group) in self._registered:
            raise ConfigError(Reason.HANDLER_TWICE, subject=subject, group=group)

    def add(self, member: Consumer[Any], subject: str = "", group: str | None = None) -> None:
        """Add a member. Raises UsageError if the members are open."""
        if self._open:
            raise UsageError(Reason.ALREADY_OPEN, "add handlers before the consumer is opened")
        self.members.append(member)
        if group is not None:
            self._registered.add((subject, group))

    async def open(self) -> None:
        """
        Open all members, or none.

        Raises:
            HandlerTypeError: there is no member.
            UsageError: the members are open.
            ClosedError: `close` was called in the meantime.
            BaseException: a member failed to open.
        """
        if not self.members:
            raise HandlerTypeError(
                "a consumer without a subject handles nothing: "
                "@consumer.on(subject, group=...), or "
                "Consumer(meta, subject=..., group=...)"
            )
        if self._open:
            raise UsageError(Reason.ALREADY_OPEN, "the consumer is open already")
        self._open = True
        close_count = self._close_count
        try:
            async with AsyncExitStack() as opened:
                for member in self.members:
                    await member.__aenter__()
                    opened.push_async_callback(member.close)
                    if close_count != self._close_count:
                        raise ClosedError("the consumer was closed while it was opened")
                opened.pop_all()
        except BaseException:
            self._open = False
            raise

    def begin_close(self) -> asyncio.Task[None] | None:
        """Start closing all members. Return the task that `close` waits for, or None if there is
        nothing to wait for.
        """
        self._open = False
        self._close_count += 1
        tasks = [member.begin_close() for member in self.members]
        close_tasks = [task for task in tasks if task is not None]
        if not close_tasks:
            return None
        return start_task(_wait_for_all(close_tasks), name="close consumers")

    async def wait(self) -> None:
        """Wait until all members are closed. If one has ended with an error, raise it."""
        if not self.members:
            raise ClosedError("the consumer was never opened")
        async with Race() as race:
            pending = {race.start(error_of(member.wait())) for member in self.members}
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if (error := task.result()) is not None:
                        raise error

    async def run(self) -> None:
        """Open the members if they are not open, wait until a signal arrives, one of them ends or
        `close` is called, and then close all.
        """
        close_count = self._close_count
        with environment_of(None).stop_signals() as stop:
            try:
                if not self._open:
                    await self.open()
            except UnreachableError as unreached:
                raise unreached.with_traceback(None) from None  # a script ends with this error
            except ClosedError:
                if close_count == self._close_count:
                    raise
            if close_count != self._close_count:
                return
            print_ready_line(f"set of {counted(len(self.members), 'consumer')}")
            try:
                async with Race() as race:
                    has_ended = race.start(error_of(self.wait()), name="wait for the end")
                    race.start(stop.event.wait(), name="wait for a signal")
                    await race.first()
                    if has_ended.done() and (error := has_ended.result()) is not None:
                        raise error
            finally:
                if (closing := self.begin_close()) is not None:
                    await shield(closing)

    async def suspend(self) -> None:
        """Suspend all members, one after another, because a handler may call this."""
        for member in self.members:
            await member.suspend()

    async def resume(self) -> None:
        """Resume all members."""
        for member in self.members:
            await member.resume()


async def _wait_for_all(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for all tasks, and then raise the first error."""
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


class BatchIteration:
    """
    Iterates over a consumer's Arrow batches. It is not a generator, because cancelling `anext`
    would end a generator.

    Args:
        find_loop: returns what delivers to the program; raises an error if there is none.
    """

    def __init__(self, find_loop: Callable[[], LoopDispatch]) -> None:
        self._find_loop = find_loop
        self._current_loop: LoopDispatch | None = None
        """What the batches come from; a consumer that is closed and reopened has
        another.
        """

    def __aiter__(self) -> BatchIteration:
        return self

    async def __anext__(self) -> ArrowBatch:
        """Return the next batch; see `LoopDispatch.take_arrow`."""
        if self._current_loop is None:
            self._current_loop = self._find_loop()
        return await self._current_loop.take_arrow()


class Iteration:
    """
    Iterates over a consumer's messages.

    Args:
        loop_binding: the consumer's loop binding.
        find_loop: returns what delivers to the program; raises an error if there is none.
    """

    def __init__(self, loop_binding: LoopBinding, find_loop: Callable[[], LoopDispatch]) -> None:
        self._loop_binding = loop_binding
        self._find_loop = find_loop
        self._current_loop: LoopDispatch | None = None
        """What the last message came from; once it is closed, `take_unregistered`
        returns None.
        """

    def __aiter__(self) -> Iteration:
        return self

    async def __anext__(self) -> Message[Any]:
        """Return the next message; see `LoopDispatch.next`."""
        stream = self._current_loop
        if stream is not None and get_ident() == self._loop_binding.thread:
            message = stream.take_unregistered()
            if message is not None:
                return message
        self._current_loop = stream = self._find_loop()
        self._loop_binding.check_thread()
        return await stream.next()


NEXT_CODES.add(Iteration.__anext__.__code__)
