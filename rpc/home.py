"""Where a client is open: in one event loop of one process.  Elsewhere it is refused by name.

    closed ⇄ open ──fork──▶ in the child: forked, for good; its sockets and its event loop are the parent's

Invariants
    A client that was open when its process was forked does nothing in the child, and nothing of it is finalized
    there: a finalizer would take the parent's sockets out of the selector that both processes have.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from threading import get_ident
from typing import Any, NoReturn
from weakref import WeakSet

from ..protocol.errors import (
    AlreadyOpenError,
    ClosedError,
    ForkedError,
    InvalidRequestError,
    OtherLoopError,
)

NO_THREAD = 0
"""No thread has this identifier."""


class Home:
    """
    Of one client, of which errors speak as `what`.

    A check asks for the running event loop, which on Python 3.11 costs a system call: a call that is made for each
    message makes it once for a batch.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = NO_THREAD
        self._kept: object = None
        self._on_fork: Callable[[], None] = _nothing
        self._forked = False

    @property
    def here(self) -> bool:
        """True while it is open, unless that was before a fork of this process."""
        return self._loop is not None

    @property
    def state(self) -> str:
        """For people: "open", "closed", or "forked" in a child of the process in which it is open."""
        return "open" if self.here else "forked" if self._forked else "closed"

    def enter(self, kept: object, on_fork: Callable[[], None]) -> None:
        """
        Be at home in the running event loop.

        Args:
            kept: what must not be finalized in a child of this process.
            on_fork: called in such a child.

        Raises:
            ForkedError, AlreadyOpenError
        """
        if self._forked:
            raise ForkedError(f"the {self._what} was open when this process was forked")
        if self._loop is not None and not self._loop.is_closed():
            raise AlreadyOpenError(f"the {self._what} is open already")
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._kept = kept
        self._on_fork = on_fork
        _OPEN.homes.add(self)

    def leave(self) -> None:
        """Be closed."""
        self._loop = self._kept = None
        self._on_fork = _nothing
        self._thread = NO_THREAD

    def check(self) -> None:
        """
        Let a call through that is made where the client is open.

        Raises:
            ClosedError, ForkedError, OtherLoopError
        """
        self.check_not_elsewhere()
        if self._loop is None:
            raise ClosedError(f"the {self._what} is not open; use: async with")

    def check_not_elsewhere(self) -> None:
        """As `check`, but one that is closed is let through."""
        if self._forked:
            raise ForkedError(f"the {self._what} was open when this process was forked")
        if self._loop is not None and asyncio._get_running_loop() is not self._loop:
            self._refuse_loop(self._loop)

    def check_thread(self) -> None:
        """As `check_not_elsewhere`, quicker, and with an eye for threads and processes only."""
        if get_ident() != self._thread:
            self.check_not_elsewhere()

    def _refuse_loop(self, loop: asyncio.AbstractEventLoop) -> NoReturn:
        if loop.is_closed():
            raise OtherLoopError(f"the event loop in which the {self._what} was opened has ended")
        if self._thread != get_ident():
            raise OtherLoopError(f"the {self._what} was opened in another thread")
        raise OtherLoopError(f"the {self._what} was opened in another event loop")

    def forked(self) -> None:
        """This process is a child of the one in which it is open."""
        self._forked = True
        self._loop = None
        self._thread = NO_THREAD
        self._on_fork()


def _nothing() -> None:
    """A client without more to do in a child."""


class _Open:
    """The homes of this process, and after a fork those of its parents, which are kept for ever."""

    def __init__(self) -> None:
        self.homes: WeakSet[Home] = WeakSet()
        self._of_parents: list[Home] = []

    def in_child(self) -> None:
        for home in self.homes:
            if home.here:
                home.forked()
                self._of_parents.append(home)
        self.homes = WeakSet()


_OPEN = _Open()
os.register_at_fork(after_in_child=_OPEN.in_child)


class Resident:
    """A client with a home: there is one of it, which is neither copied nor pickled."""

    def __reduce_ex__(self, _protocol: object) -> Any:
        kind = type(self).__name__
        raise InvalidRequestError(
            f"a {kind} is neither copied nor pickled: make another one where it is used"
        )
