"""Sends what changes on a page to all browsers that show it, by server-sent events.

    a page that somebody shows ─▶ PageChannel: drawn once a second ─▶ its changes, encoded once
                                                                     ├─▶ a browser
                                                                     ╰─▶ another one

Invariants
    A page is built once a second, however many browsers show it, and not at all if none does.
    A browser that is behind gets all cells of the newest page, never a backlog.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable

import msgspec

from ..protocol.clock import Clock
from ..protocol.errors import KeylaneError, OverloadedError
from ..protocol.text import format_time
from ..rpc.race import start_task
from .page import LiveValue, Page, changed
from .sign_in import SIGNED_OUT

log = logging.getLogger("keylane.console")

PERIOD_S = 1.0
STREAMS_MAX = 200
"""The maximum number of open streams of a metaserver."""
EVENT_BYTES_MAX = 128 << 10
"""The maximum size of an event, in bytes; instead of a larger one the browser draws the page
again.
"""
BUSY_SHARE = 4
"""A page that takes long to build is built less often: it takes at most 1 / BUSY_SHARE of the
time.
"""


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a browser is sent."""

    at: str = ""
    """The time of the sample, in ISO 8601; "" without one."""
    structure: str = ""
    cells: dict[str, LiveValue] = {}
    problem: str = ""
    """Why the page cannot be renewed now."""
    code: int = 0
    """The code of the error that is the problem."""
    signed_out: bool = False


def encode_event(event: object, name: str = "") -> bytes:
    """Return an event as it is sent."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(event) + b"\n\n"


def encode_error(error: KeylaneError) -> bytes:
    """Return the event that tells a browser why there is nothing new."""
    if isinstance(error, SIGNED_OUT):
        return encode_event(Event(signed_out=True))
    return encode_event(Event(problem=error.message, code=error.code))


class PageChannel:
    """One page, and the browsers that show it."""

    def __init__(self, build: Callable[[], Awaitable[Page]], clock: Clock) -> None:
        self._build = build
        self._clock = clock
        self.users = 0
        self.number = 0
        """The number of samples that have ended."""
        self.is_closed = False
        self._at = ""
        self._cells: dict[str, LiveValue] = {}
        """All cells of the newest sample; none if it has failed."""
        self._structure = ""
        self._delta = b""
        """What has changed with the newest sample."""
        self._news = asyncio.Event()
        self._task = start_task(self._run())

    async def _run(self) -> None:
        while True:
            started_s = self._clock.boot_ns() / 1e9
            await self._sample()
            took_s = self._clock.boot_ns() / 1e9 - started_s
            news, self._news = self._news, asyncio.Event()
            news.set()
            await asyncio.sleep(max(PERIOD_S - took_s, took_s * (BUSY_SHARE - 1)))

    async def _sample(self) -> None:
        at = format_time(self._clock.wall_ms())
        cells: dict[str, LiveValue] = {}
        structure, problem = "", b""
        try:
            page = await self._build()
            cells, structure = page.live(), page.structure()
        except KeylaneError as error:
            problem = encode_error(error)
        except Exception:
            log.exception("a bug: cannot draw a page of the console")
            problem = encode_event(Event(problem="a bug in the console; its log has more"))
        delta = changed(self._cells, cells) if structure == self._structure else cells
        # Until here, a browser that comes meanwhile gets the sample before.
        self._at, self._cells, self._structure = at, cells, structure
        self._delta = problem or self._encoded(delta)
        self.number += 1

    def _encoded(self, cells: dict[str, LiveValue]) -> bytes:
        data = encode_event(Event(self._at, structure=self._structure, cells=cells))
        if len(data) > EVENT_BYTES_MAX:
            return encode_event(Event(self._at, structure="too large"))
        return data

    async def wait(self, seen: int) -> tuple[int, bytes]:
        """Return the number of the newest sample after `seen`, and what to send."""
        while self.number == seen and not self.is_closed:
            await self._news.wait()
        if self.is_closed:
            return -1, b""
        if self.number == seen + 1 or not self._cells:
            return self.number, self._delta
        return self.number, self._encoded(self._cells)

    async def close(self) -> None:
        """End the work; those who wait are woken."""
        self.is_closed = True
        self._news.set()
        self._task.cancel()
        await asyncio.wait([self._task])


class Live:
    """The channels of a console."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._channels: dict[Hashable, PageChannel] = {}
        self._streams = 0

    async def stream(
        self, name: Hashable, build: Callable[[], Awaitable[Page]]
    ) -> AsyncGenerator[bytes, None]:
        """
        Yield the events of a page until the browser leaves.

        Args:
            name: the page, and who looks at it.
            build: builds the page.

        Raises:
            OverloadedError: so many streams are open.
        """
        if self._streams >= STREAMS_MAX:
            raise OverloadedError(f"{STREAMS_MAX} pages of the console are open", limit=STREAMS_MAX)
        self._streams += 1
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = PageChannel(build, self._clock)
        channel.users += 1
        try:
            yield b"retry: 1000\n\n"
            seen = channel.number - 2 if channel.number > 1 else 0
            while True:
                seen, data = await channel.wait(seen)
                if not data:
                    return
                yield data
        finally:
            self._streams -= 1
            channel.users -= 1
            if not channel.users:
                self._channels.pop(name, None)
                await channel.close()

    async def close(self) -> None:
        """End all streams."""
        for channel in list(self._channels.values()):
            await channel.close()
