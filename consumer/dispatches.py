"""The receivers of a consumer's messages: handlers, for one message or for batches, in tasks or in
threads, or its iteration.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..protocol.errors import ConfigError, HandlerTypeError
from ..protocol.routing import ConsumeStrategy
from ..rpc.environment import Environment
from ..rpc.home import Home
from .delivery.filter import MessageFilter
from .handling.acked_first import AckedFirst
from .handling.batch_workers import BatchWorkers
from .handling.failing import Failing
from .handling.filtered import Filtering, filtered, filtered_batches
from .handling.handlers import BatchHandler, Handler, check_handler, is_async
from .handling.stream import Stream
from .handling.threads import HandlerThreads
from .handling.workers import Workers
from .settings import AckMode, ConsumerSettings


@dataclass(frozen=True, slots=True)
class Calls:
    """
    The user's functions that get messages.

    Attributes:
        handler: gets one message at a time.
        batch_handler: gets several.
    """

    handler: Handler[Any] | None = None
    batch_handler: BatchHandler[Any] | None = None

    def check(self, settings: ConsumerSettings, *, alone: bool) -> None:
        """
        Check that they can be called; `alone` is False if handlers are added later.

        Raises:
            HandlerTypeError: a function cannot be called, or there are two.
            ConfigError: the settings are for a handler.
        """
        if settings.ack is AckMode.BEFORE and alone and self.one is None:
            raise ConfigError(
                "ack='before' is for handlers; a loop acks first itself: ack='each', and await "
                "message.ack() before the work"
            )
        if self.handler is not None and self.batch_handler is not None:
            two = HandlerTypeError("a consumer has a handler or a batch_handler, not both")
            two.hint = "Give one of them, or a group of its own to a second consumer."
            raise two
        if self.handler is not None:
            check_handler(self.handler)
        if self.batch_handler is not None:
            check_handler(self.batch_handler, "one list of messages")
        if settings.threads and alone and self.one is None:
            raise ConfigError("threads are for a handler; there is none")
        if settings.threads and is_async(self.one):
            raise HandlerTypeError("a handler that runs in threads is a def, not an async def")

    @property
    def one(self) -> Any:
        """Return the handler of either kind; None if there is none."""
        return self.handler if self.handler is not None else self.batch_handler


class Dispatches:
    """Makes the dispatch of an opening, and ends the threads on which it runs."""

    def __init__(
        self,
        calls: Calls,
        *,
        settings: ConsumerSettings,
        home: Home,
        wanted: MessageFilter | None = None,
    ) -> None:
        self._calls = calls
        self._wanted = wanted
        self._settings = settings
        self._home = home
        self._threads: HandlerThreads | None = None

    def new(
        self,
        *,
        environment: Environment,
        rng: random.Random,
        on_crash: Callable[[BaseException], None],
        client: str,
    ) -> Workers | Stream:
        """Return the dispatch of a new opening; `client` is the name of the consumer, for
        people.
        """
        calls, settings, clock = self._calls, self._settings, environment.clock
        ordered = settings.consume_strategy is ConsumeStrategy.EXCLUSIVE
        failing = Failing(client=client, wall_ms=clock.wall_ms, rng=rng, in_place=not ordered)
        failing.adopt(settings)
        if calls.one is None:
            return Stream(
                clock=clock,
                handover_ms=settings.handover_ms,
                check=self._home.check_not_elsewhere,
                ordered=ordered,
                failing=failing,
                filtering=None
                if self._wanted is None
                else Filtering(self._wanted, settings.handler_backoff, rng),
            )
        handler, threads, first = calls.one, None, None
        if self._wanted is not None:
            filters = filtered if calls.batch_handler is None else filtered_batches
            handler = filters(handler, self._wanted)
        if settings.threads:
            threads = self._threads = HandlerThreads(
                handler,
                0 if environment.in_place else settings.threads,
                forked=lambda: self._home.state == "forked",
            )
            handler = threads.run
        if settings.ack is AckMode.BEFORE:
            first = AckedFirst(handler, boot_ms=clock.boot_ms)
            handler = first.handle if calls.batch_handler is None else first.handle_all
        known: dict[str, Any] = {
            "concurrency": settings.threads or settings.concurrency,
            "handover_ms": settings.handover_ms,
            "handler_timeout_ms": settings.handler_timeout_ms or 0,
            "cancels": not settings.threads,
            "backoff": settings.try_backoff,
            "clock": clock,
            "rng": rng,
            "on_crash": on_crash,
            "ordered": ordered,
            "acks_each": settings.ack is AckMode.EACH,
            "failing": failing,
        }
        workers: Workers
        if calls.batch_handler is None:
            workers = Workers(handler, **known)
        else:
            wait_ms, most = settings.max_wait_ms, settings.max_records
            workers = BatchWorkers(handler, max_records=most, max_wait_ms=wait_ms, **known)
        if threads is not None:
            threads.ends = lambda: workers.ends(asyncio.current_task())
            threads.on_end = on_crash
        if first is not None:
            first.timed_out = lambda: workers.timed_out(asyncio.current_task())
        return workers

    def begin(self) -> None:
        """Start the threads of the opening. Raises ConfigError if the system provides too few."""
        if self._threads is not None:
            self._threads.start()

    def end(self) -> None:
        """Let the threads of the opening end."""
        if self._threads is not None:
            self._threads.stop()
            self._threads = None
