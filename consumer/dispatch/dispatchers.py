"""Builds the dispatcher that delivers a consumer's messages: to a handler or batch handler, in
tasks or threads, or to an iterating program.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...protocol.errors import ConfigError, HandlerTypeError
from ...protocol.routing import ConsumeStrategy
from ...rpc.environment import Environment
from ...rpc.loop_binding import LoopBinding
from ...rpc.tracing import current_tracing
from ..filter import MessageFilter
from ..settings import AckMode, ConsumerSettings
from .failures import FailureRecords
from .handlers import (
    BatchHandler,
    Handler,
    check_handler,
    filtered,
    filtered_batches,
    is_async,
    traced,
)
from .jobs import BatchJobs, MessageJobs
from .loop import LoopDispatch
from .threads import HandlerThreads
from .workers import WorkerPool


@dataclass(frozen=True, slots=True)
class UserHandlers:
    """
    Holds the user's handler, if there is one.

    Attributes:
        handler: called with one message.
        batch_handler: called with a list of messages.
    """

    handler: Handler[Any] | None = None
    batch_handler: BatchHandler[Any] | None = None

    def check(self, settings: ConsumerSettings, *, alone: bool) -> None:
        """
        Check that the handler is callable and fits the settings.

        Args:
            alone: False if handlers are registered later, by `Consumer.on`.

        Raises:
            HandlerTypeError: a function cannot be called as a handler, or both kinds are given.
            ConfigError: the settings need a handler, and there is none.
        """
        if settings.ack is AckMode.BEFORE and alone and self.any_handler is None:
            raise ConfigError(
                "ack='before' needs a handler; in a loop, use ack='each' and await message.ack() "
                "before the work"
            )
        if self.handler is not None and self.batch_handler is not None:
            error = HandlerTypeError("a consumer has a handler or a batch_handler, not both")
            error.hint = "Pass one of them, or use a second consumer in another group."
            raise error
        if self.handler is not None:
            check_handler(self.handler)
        if self.batch_handler is not None:
            check_handler(self.batch_handler, "one list of messages")
        if settings.threads and alone and self.any_handler is None:
            raise ConfigError("threads= needs a handler, and there is none")
        if settings.threads and is_async(self.any_handler):
            raise HandlerTypeError("with threads=, the handler must be a def, not an async def")

    @property
    def any_handler(self) -> Any:
        """The handler, of either kind, or None."""
        return self.handler if self.handler is not None else self.batch_handler


class DispatcherFactory:
    """Builds the dispatcher for each opening of a consumer, and owns the threads in which it runs
    handlers.
    """

    def __init__(
        self,
        handlers: UserHandlers,
        *,
        settings: ConsumerSettings,
        loop_binding: LoopBinding,
        message_filter: MessageFilter | None = None,
    ) -> None:
        self._handlers = handlers
        self._message_filter = message_filter
        self._settings = settings
        self._loop_binding = loop_binding
        self._threads: HandlerThreads | None = None

    def create(
        self,
        *,
        environment: Environment,
        on_crash: Callable[[BaseException], None],
        client: str,
    ) -> WorkerPool | LoopDispatch:
        """Return the dispatcher for a new opening. `client` is the consumer's display name."""
        handlers, settings, clock = self._handlers, self._settings, environment.clock
        ordered = settings.consume_strategy is ConsumeStrategy.EXCLUSIVE
        records = FailureRecords(client=client, wall_ms=clock.wall_ms)
        if handlers.any_handler is None:
            return LoopDispatch(
                clock=clock,
                handover_ms=settings.handover_ms,
                check=self._loop_binding.check_not_elsewhere,
                records=records,
                ordered=ordered,
                message_filter=self._message_filter,
            )
        handler, threads = handlers.any_handler, None
        if (tracing := current_tracing()) is not None:
            handler = traced(handler, tracing)
        if self._message_filter is not None:
            wrap = filtered if handlers.batch_handler is None else filtered_batches
            handler = wrap(handler, self._message_filter)
        if settings.threads:
            threads = self._threads = HandlerThreads(
                handler,
                0 if environment.in_place else settings.threads,
                forked=lambda: self._loop_binding.state == "forked",
            )
            handler = threads.run
        in_batches = handlers.batch_handler is not None
        pool = WorkerPool(
            partial(BatchJobs if in_batches else MessageJobs, handler),
            runner="handler of batches" if in_batches else "handler",
            concurrency=settings.threads or settings.concurrency,
            handover_ms=settings.handover_ms,
            clock=clock,
            on_crash=on_crash,
            failures=records,
            handler_timeout_ms=settings.handler_timeout_ms or 0,
            cancels=not settings.threads,
            ordered=ordered,
        )
        if threads is not None:
            threads.is_ending_worker = lambda: pool.is_ending_worker(asyncio.current_task())
            threads.on_end = on_crash
        return pool

    def start_threads(self) -> None:
        """Start the handler threads. Raises ConfigError if the system cannot start enough."""
        if self._threads is not None:
            self._threads.start()

    def stop_threads(self) -> None:
        """Stop the handler threads once their handlers return."""
        if self._threads is not None:
            self._threads.stop()
            self._threads = None
