"""Runs several consumers together: the registrations of a `Consumer` without its own subject."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from typing import Protocol

from ..protocol.control import SHORT_TEXT_CHARS_MAX
from ..protocol.errors import (
    ClosedError,
    ConfigError,
    HandlerTypeError,
    Reason,
    UnreachableError,
    UsageError,
)
from ..protocol.ids import check_name
from ..protocol.text import counted
from ..rpc.environment import environment_of
from ..rpc.race import Race, error_of, shield, start_task
from .dispatch.dispatchers import UserHandlers
from .ready_line import print_ready_line
from .settings import ConsumerSettings

_NOT_ENCODABLE = re.compile("[\0\ud800-\udfff]")
"""NUL, and lone surrogates, which UTF-8 cannot encode."""


class Member(Protocol):
    """A consumer that belongs to a `ConsumerSet`."""

    async def __aenter__(self) -> object:
        """Join the group."""
        ...

    async def close(self) -> None:
        """Hand over all partitions."""
        ...

    def begin_close(self) -> asyncio.Task[None] | None:
        """Start handing over all partitions. Return the task that `close` waits for, or None if
        there is nothing to wait for.
        """
        ...

    async def wait(self) -> None:
        """Wait until the consumer is closed."""
        ...

    async def suspend(self) -> None:
        """Hand over all partitions and receive nothing until `resume`."""
        ...

    async def resume(self) -> None:
        """Receive messages again after `suspend`."""
        ...


class ConsumerSet:
    """Opens, runs and closes its members together; an error in one closes all."""

    def __init__(self) -> None:
        self.members: list[Member] = []
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

    def add(self, member: Member, subject: str = "", group: str | None = None) -> None:
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

    async def close(self) -> None:
        """Close all members, even if one fails to close."""
        close_task = self.begin_close()
        if close_task is not None:
            await shield(close_task)

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
                await self.close()

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


def new_consumer_set(
    subject: object, group: object, handlers: UserHandlers, settings: ConsumerSettings
) -> ConsumerSet | None:
    """Return a `ConsumerSet` for a consumer without a subject; otherwise check the names and return
    None. Raises ConfigError.
    """
    if settings.broadcast and subject is None:
        raise ConfigError(
            "broadcast=True needs a subject: Consumer(meta, subject=..., settings=...)"
        )
    if subject is not None or group is not None:
        _check_names(subject, group, settings.name, broadcast=settings.broadcast)
        return None
    if handlers.any_handler is not None:
        raise ConfigError(
            "a handler needs a subject and a group: Consumer(meta, subject=..., group=..., "
            "handler=...)"
        )
    return ConsumerSet()


def _check_names(subject: object, group: object, name: object, *, broadcast: bool) -> None:
    """
    Check the names.

    Raises:
        InvalidRequestError: the subject or the group is not a valid name.
        ConfigError: one of them is missing, there are several subjects, or metaservers do not
            accept `name` as the name of a client.
    """
    if subject is None:
        raise ConfigError(
            f"subject= is missing: Consumer(meta, subject=..., group={group!r:.40}); for several "
            "subjects, give each its group: @consumer.on(subject, group=...)"
        )
    if group is None and not broadcast:
        raise ConfigError(
            f"group= is missing: Consumer(meta, subject={subject!r:.40}, group=...); or "
            "ConsumerSettings(broadcast=True), for every message that is sent once it is open"
        )
    if isinstance(subject, list | tuple | set | frozenset):
        raise ConfigError(
            "subject= takes one name; for several subjects, leave it out, and add a function for "
            "each: @consumer.on(subject, group=...)"
        )
    check_name("subject", subject)
    if not broadcast:
        check_name("consumer group", group)
    is_short_text = isinstance(name, str) and len(name) <= SHORT_TEXT_CHARS_MAX
    if not is_short_text or _NOT_ENCODABLE.search(str(name)):
        raise ConfigError(
            f"name must be text of at most {SHORT_TEXT_CHARS_MAX} characters, without NUL, not "
            f"{name!r:.40}"
        )
