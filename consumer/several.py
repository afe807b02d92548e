"""Several consumers that run together: those of a `Consumer` without a subject of its own."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from typing import Protocol

from ..protocol.control import SHORT_TEXT_CHARS_MAX
from ..protocol.errors import ClosedError, ConfigError, HandlerTypeError, Reason, UsageError
from ..protocol.ids import check_name
from ..rpc.environment import environment_of
from ..rpc.race import Race, error_of, shield, start_task
from .dispatches import Calls
from .settings import ConsumerSettings

_UNSENDABLE = re.compile("[\0\ud800-\udfff]")
"""NUL and lone surrogates, which have no bytes in UTF-8."""


class Member(Protocol):
    """A consumer among several."""

    async def __aenter__(self) -> object:
        """Join the group."""
        ...

    async def close(self) -> None:
        """Hand everything over."""
        ...

    def begin_close(self) -> asyncio.Task[None] | None:
        """Begin to hand everything over, and return the task for which `close` waits, or None if it
        waits for nothing.
        """
        ...

    async def wait(self) -> None:
        """Wait until the consumer is closed."""
        ...

    async def suspend(self) -> None:
        """Hand everything over, and receive nothing until `resume`."""
        ...

    async def resume(self) -> None:
        """Take part again."""
        ...


class Several:
    """Opens, runs and closes its members together; if one ends with an error, all end."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._taken: set[tuple[str, str]] = set()
        """The subjects and groups that have a member."""
        self._open = False
        self._closings = 0
        """The number of calls of `begin_close`."""

    @property
    def state(self) -> str:
        """Return the state, for people."""
        return "open" if self._open else "closed"

    def check_new(self, subject: str, group: str | None) -> None:
        """Raise ConfigError if this group of the subject has a member; broadcast consumers have no
        group.
        """
        if group is not None and (subject, group) in self._taken:
            raise ConfigError(Reason.HANDLER_TWICE, subject=subject, group=group)

    def add(self, member: Member, subject: str = "", group: str | None = None) -> None:
        """Add a member. Raises UsageError if they are open."""
        if self._open:
            raise UsageError(
                Reason.ALREADY_OPEN, "handlers are added before the consumer is opened"
            )
        self.members.append(member)
        if group is not None:
            self._taken.add((subject, group))

    async def open(self) -> None:
        """
        Open all members, or none.

        Raises:
            HandlerTypeError: there is no member.
            UsageError
            ClosedError: `close` was called meanwhile.
            BaseException: the opening of a member raised it.
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
        closings = self._closings
        try:
            async with AsyncExitStack() as opened:
                for member in self.members:
                    await member.__aenter__()
                    opened.push_async_callback(member.close)
                    if closings != self._closings:
                        raise ClosedError("the consumer was closed while it was opened")
                opened.pop_all()
        except BaseException:
            self._open = False
            raise

    async def close(self) -> None:
        """Close all members, even if the close of one fails."""
        ending = self.begin_close()
        if ending is not None:
            await shield(ending)

    def begin_close(self) -> asyncio.Task[None] | None:
        """Begin to close all members, and return the task for which `close` waits, or None if it
        waits for nothing.
        """
        self._open = False
        self._closings += 1
        endings = [member.begin_close() for member in self.members]
        waited = [ending for ending in endings if ending is not None]
        return start_task(_end(waited), name="closing several") if waited else None

    async def wait(self) -> None:
        """Wait until all members are closed, or one has ended with an error, which it raises."""
        if not self.members:
            raise ClosedError("the consumer was never opened")
        async with Race() as race:
            waits = [race.start(error_of(member.wait())) for member in self.members]
            left = set(waits)
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    if (error := each.result()) is not None:
                        raise error

    async def run(self) -> None:
        """Open the members if they are not open, wait for a signal, for the end of one or for
        `close`, and close all.
        """
        closings = self._closings
        with environment_of(None).stop_signals() as stop:
            try:
                if not self._open:
                    await self.open()
            except ClosedError:
                if closings == self._closings:
                    raise
            if closings != self._closings:
                return
            try:
                async with Race() as race:
                    ended = race.start(error_of(self.wait()), name="wait for the end")
                    race.start(stop.event.wait(), name="wait for a signal")
                    await race.first()
                    if ended.done() and (error := ended.result()) is not None:
                        raise error
            finally:
                await self.close()

    async def suspend(self) -> None:
        """Suspend all members, one after another, because a handler may call it."""
        for member in self.members:
            await member.suspend()

    async def resume(self) -> None:
        """Resume all members."""
        for member in self.members:
            await member.resume()


async def _end(endings: list[asyncio.Task[None]]) -> None:
    """Wait for all, and raise the first error."""
    for outcome in await asyncio.gather(*endings, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def several_if(
    subject: object, group: object, calls: Calls, settings: ConsumerSettings
) -> Several | None:
    """Return the container for consumers of `on`, if there is no subject; otherwise check the
    names. Raises ConfigError.
    """
    if settings.broadcast and subject is None:
        raise ConfigError(
            "broadcast=True is of a subject: Consumer(meta, subject=..., settings=...)"
        )
    if subject is not None or group is not None:
        _check_names(subject, group, settings.name, broadcast=settings.broadcast)
        return None
    if calls.one is not None:
        raise ConfigError(
            "a handler is of a subject and a group: Consumer(meta, subject=..., group=..., "
            "handler=...)"
        )
    return Several()


def _check_names(subject: object, group: object, name: object, *, broadcast: bool) -> None:
    """Check the names. Raises InvalidRequestError; ConfigError if one is missing, or a metaserver
    would not accept `name` for a client.
    """
    if subject is None:
        raise ConfigError(
            f"subject= is missing: Consumer(meta, subject=..., group={group!r:.40}); of several "
            f"subjects, give each "
            "its group: @consumer.on(subject, group=...)"
        )
    if group is None and not broadcast:
        raise ConfigError(
            f"group= is missing: Consumer(meta, subject={subject!r:.40}, group=...); or "
            "ConsumerSettings(broadcast=True), for every message that is sent once it is open"
        )
    check_name("subject", subject)
    if not broadcast:
        check_name("consumer group", group)
    text = isinstance(name, str) and len(name) <= SHORT_TEXT_CHARS_MAX
    if not text or _UNSENDABLE.search(str(name)):
        raise ConfigError(
            f"name must be text of at most {SHORT_TEXT_CHARS_MAX} characters, without NUL, not "
            f"{name!r:.40}"
        )
