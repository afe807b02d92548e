"""One opening of a consumer: from the join of its group until all its partitions are handed over.

start ─▶ join ─▶ opened ─▶ close, or a fatal error ─▶ hand over ─▶ leave ─▶ ended
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..protocol.codecs.codec import Codec
from ..protocol.groups import GroupStart
from ..protocol.reading.instants import GroupStartOption, group_start
from ..rpc.client import MetaClient
from ..rpc.connections import Connections, clean_up, finish_despite_cancel
from ..rpc.environment import Environment
from ..rpc.operating.client_counts import CONSUMERS
from ..rpc.race import start_closing_task
from ..rpc.stop_signals import is_signaled
from .dispatch.dispatchers import DispatcherFactory, UserHandlers
from .dispatch.loop import LoopDispatch
from .dispatch.workers import WorkerPool
from .filter import MessageFilter
from .group.assignments import Assignments
from .group.broadcast import Broadcast
from .group.membership import Member, Membership
from .running import QUIET_CLOSE_S, format_waiting
from .session_shell import SuspectLock
from .settings import ConsumerSettings

log = logging.getLogger("keylane.consumer")


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """What a consumer was created with."""

    subject: str
    group: str
    """"" for a broadcast consumer."""
    handlers: UserHandlers
    settings: ConsumerSettings
    codec: Codec[Any] | None
    message_filter: MessageFilter | None
    start: GroupStartOption | GroupStart | None
    """Where the group begins if it is new."""
    alone: SuspectLock
    """Runs messages that may kill the process one at a time."""


class ConsumerOpening:
    """
    Joins the group, and hands everything over at the end.

    Args:
        client: the consumer's display name.
        on_program_end: called when a handler has ended the program.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        client: str,
        meta: MetaClient,
        connections: Connections,
        dispatchers: DispatcherFactory,
        environment: Environment,
        *,
        on_program_end: Callable[[], None],
    ) -> None:
        settings, clock = options.settings, environment.clock
        member = Member(options.subject, options.group, client)
        self.name = member.name
        self._options = options
        self._meta = meta
        self._connections = connections
        self._dispatchers = dispatchers
        self._on_program_end = on_program_end
        rng = environment.new_rng()
        membership: Membership | Broadcast
        if settings.broadcast:
            membership = Broadcast(member, meta=meta, connections=connections, clock=clock)
        else:
            membership = Membership(
                member,
                meta=meta,
                settings=settings,
                clock=clock,
                rng=rng,
                identity=environment.draw_identity,
                start=group_start(options.start, now_ms=clock.wall_ms()),
                filter_text="" if options.message_filter is None else options.message_filter.text,
            )
        self.membership: Membership | Broadcast | None = membership
        """None once the consumer has left its group, or could not join it."""
        self.dispatcher: WorkerPool | LoopDispatch = dispatchers.create(
            environment=environment, on_crash=self.fail, client=client
        )
        self.assignments: Assignments | None = Assignments(
            settings=settings,
            clock=clock,
            rng=rng,
            connections=connections,
            membership=membership,
            dispatcher=self.dispatcher,
            codec=options.codec,
            fail=self.fail,
            message_filter=options.message_filter,
            alone=options.alone,
        )
        connections.loop_binding.on_fork = self.assignments.on_fork
        self.closing: asyncio.Task[None] | None = None
        """The task that hands over all partitions, after `close` or a fatal error."""
        self._opened = asyncio.Event()
        """Set when the opening has succeeded or failed."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once everything is handed over, or with the error that ended the consumer."""

    async def start(self) -> None:
        """Join the group. Raises what `Consumer.__aenter__` documents."""
        assert self.membership is not None
        assert self.assignments is not None
        try:
            self._dispatchers.start_threads()
            join = partial(self.membership.start, self.assignments)
            await self._connections.wait_for(self._meta, join)
            self.assignments.start()
            CONSUMERS.begin((self._options.subject, self._options.group), self.assignments.counts)
        except BaseException as error:
            await clean_up(partial(self._undo, error))
            raise
        finally:
            self._opened.set()

    async def _undo(self, error: BaseException) -> None:
        await self.dispatcher.close()
        if isinstance(self.membership, Membership):
            await self.membership.abandon_join(error)
        self.membership = None
        self._dispatchers.stop_threads()
        await self._connections.close()

    def close(self) -> asyncio.Task[None]:
        """Start the closing task, but only once: a signal, an error and the user may all close the
        consumer.
        """
        if self.closing is None:
            if self.assignments is not None and self._opened.is_set():
                self.assignments.stop()
            self.closing = start_closing_task(self._close(), name="closing")
        return self.closing

    async def _close(self) -> None:
        await self._opened.wait()  # another task may still be opening the consumer
        membership, dispatcher, assignments = self.membership, self.dispatcher, self.assignments
        if membership is None or assignments is None:
            return
        if isinstance(dispatcher, LoopDispatch):
            dispatcher.leave()
        try:
            with self.logging_a_long_wait():
                await assignments.close()
            await membership.stop()
            self.assignments = None
            assignments.drop_references()
        except asyncio.CancelledError:
            # A closing event loop cancels all tasks, and waits for them. Leave anyway, or the group
            # waits for the ttl.
            await dispatcher.close()
            await membership.stop()
        await finish_despite_cancel(dispatcher.close)
        self._dispatchers.stop_threads()
        await finish_despite_cancel(self._connections.close)
        CONSUMERS.end(assignments.counts)
        self.membership = self.assignments = None
        if not self.ended.done():
            self.ended.set_result(None)

    @contextmanager
    def logging_a_long_wait(self) -> Iterator[None]:
        """Log what the consumer waits for, once, if the work in the block takes long."""
        dispatcher = self.dispatcher

        def log_waiting() -> None:
            running = dispatcher.running
            if running:
                log.warning(
                    "%s",
                    format_waiting(
                        self.name,
                        running,
                        runner="handler" if isinstance(dispatcher, WorkerPool) else "loop body",
                        limit=dispatcher.end_of_wait,
                        is_signaled=is_signaled(),
                    ),
                )

        dispatcher.check_long_running()  # nothing else checks it while the consumer closes
        timer = asyncio.get_running_loop().call_later(QUIET_CLOSE_S, log_waiting)
        try:
            yield
        finally:
            timer.cancel()

    def fail(self, error: BaseException) -> None:
        """Close the consumer after a fatal error, which `wait`, `run` and the iteration then
        raise.
        """
        if self.ended.done():
            return
        log.error("%s ends: %r", self.name, error)
        self.ended.set_exception(error)
        self.ended.exception()
        if isinstance(self.dispatcher, LoopDispatch):
            self.dispatcher.fail(error)
        if not isinstance(error, Exception):
            self._on_program_end()
        self.close()

    def is_called_by_handler(self) -> bool:
        """Return True in a handler's task. Waiting for a hand-over there would deadlock, because
        the hand-over waits for the handler.
        """
        return isinstance(self.dispatcher, WorkerPool) and self.dispatcher.is_worker_task(
            asyncio.current_task()
        )

    def is_called_with_messages(self) -> bool:
        """Return True in a handler's task, and in the task that has taken messages and not acked
        them: a hand-over waits for it.
        """
        if isinstance(self.dispatcher, LoopDispatch):
            return self.dispatcher.has_messages(asyncio.current_task())
        return self.is_called_by_handler()
