"""The place where a client is open: one event loop of one process. Calls from elsewhere are
refused.

    closed ⇄ open ──fork──▶ forked: in the child, for good, because the client's sockets and its
                               │       event loop belong to the parent
                               ╰─ forked inside that loop, and back in it ─▶ the child ends

Invariants
    A client that was open when its process was forked does nothing in the child, and none of its
    objects is finalized there: a finalizer would take the parent's sockets out of the selector that
    both processes share.
    No callback of the parent's event loop runs in the child: it would read the parent's answers,
    and send in its name.
"""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import RLock, get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

from ..protocol.errors import ClosedError, InvalidRequestError, Reason, UsageError

log = logging.getLogger("keylane")

ENDED_HINT = (
    "That event loop does not run again: open the client again in the present "
    "one, with `async with`."
)
"""Hint of a UsageError if the event loop has ended."""
SAME_THREAD_HINT = (
    "Open one in each event loop, or come back to its loop. pytest-asyncio gives each test a loop "
    "of its own: a test that takes a fixture of a wider "
    "scope needs @pytest.mark.asyncio(loop_scope=...), and the fixture the same loop_scope."
)
"""Hint of a UsageError if two event loops run one after another in a thread, so that no call
can reach the other one.
"""
NO_LOOP_HINT = (
    "Start the program with asyncio.run(...), or anyio.run(..., backend='asyncio'); without an "
    "event loop use keylane.sync."
)
"""Hint of a UsageError if no asyncio event loop runs."""
_STARTS = frozenset({"start", "stop", "open", "connect"})
"""Methods with which other systems' clients are opened and closed."""
NO_THREAD = 0
"""Identifier that no thread has."""


class Home:
    """
    The event loop and the process in which a client is open.

    A check asks for the running event loop, which costs a system call on Python 3.11. Methods that
    are called for each message therefore check once for each batch.

    Args:
        what: kind of the client in errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread = NO_THREAD
        """Thread of that event loop; a call from it needs no other check."""
        self._kept: object = None
        self.on_fork: Callable[[], None] = _nothing
        """Called in a child of the process in which the client is open."""
        self._forked = False
        self._process_id = 0
        """Id of the process in which the client was opened."""

    @property
    def here(self) -> bool:
        """True while the client is open in this process; False in the child of a fork."""
        return self._loop is not None

    @property
    def state(self) -> str:
        """State for people: "open", "closed", or "forked" in a child of the process in which it is
        open.
        """
        return "open" if self.here else "forked" if self._forked else "closed"

    def enter(self, kept: object, on_fork: Callable[[], None]) -> None:
        """
        Open the client in the running event loop.

        Args:
            kept: object that must not be finalized in a child of this process.
            on_fork: called in such a child.

        Raises:
            UsageError
            UsageError: no asyncio event loop runs here.
        """
        self.check_not_forked()
        if self._loop is not None and not self._loop.is_closed():
            raise UsageError(Reason.ALREADY_OPEN, f"the {self._what} is open already")
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            none = UsageError(
                Reason.OTHER_LOOP,
                f"a {self._what} opens in a running event loop of asyncio, and there is none; "
                f"keylane does not run on trio",
            )
            none.hint = NO_LOOP_HINT
            raise none from None
        self.thread = get_ident()
        self._process_id = os.getpid()
        self._kept = kept
        self.on_fork = on_fork
        _OPEN.homes.add(self)

    def leave(self) -> None:
        """Close the client."""
        self._loop = self._kept = None
        self.on_fork = _nothing
        self.thread = NO_THREAD

    def check(self) -> None:
        """
        Check that the client is open, and that the caller is where it was opened.

        Raises:
            ClosedError, UsageError
        """
        if asyncio._get_running_loop() is self._loop is not None:
            return  # a fork ends with `_loop` None
        self.check_not_elsewhere()
        raise ClosedError(f"the {self._what} is not open")

    def check_not_elsewhere(self) -> None:
        """Check the same as `check`, but let a closed client pass."""
        self.check_not_forked()
        if self._loop is not None and asyncio._get_running_loop() is not self._loop:
            self._refuse_loop(self._loop)

    def check_not_forked(self) -> None:
        """Raise UsageError if this process is a child of the one in which the client is open."""
        if self._forked:
            raise UsageError(
                Reason.FORKED, f"the {self._what} was open when this process was forked"
            )

    def check_thread(self) -> None:
        """Check the same as `check_not_elsewhere`, but faster: in the thread of the opening it does
        not ask for the event loop.
        """
        if get_ident() != self.thread:
            self.check_not_elsewhere()

    def _refuse_loop(self, loop: asyncio.AbstractEventLoop) -> NoReturn:
        if loop.is_closed():
            ended = UsageError(
                Reason.OTHER_LOOP, f"the event loop in which the {self._what} was opened has ended"
            )
            ended.hint = ENDED_HINT
            raise ended
        if self.thread != get_ident():
            raise UsageError(Reason.OTHER_LOOP, f"the {self._what} was opened in another thread")
        other = UsageError(Reason.OTHER_LOOP, f"the {self._what} was opened in another event loop")
        other.hint = SAME_THREAD_HINT
        raise other

    def forked(self) -> None:
        """Note that this process is a child of the one in which the client is open."""
        if self._loop is not None and self.thread == get_ident() and self._loop.is_running():
            _end_on_return(self._loop, f"the {self._what} is open in process {self._process_id}")
        self._forked = True
        self._loop = None
        self.thread = NO_THREAD
        self.on_fork()


def held_here() -> Callable[[], bool]:
    """
    Return a function that returns True only in this thread.

    A lock that is held here compares the thread without making a number of it: it takes 13 ns,
    while `get_ident` and a comparison take 40. `threading.Condition` does the same.
    """
    lock = RLock()
    lock.acquire()
    owned: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]  # not in the stubs
    return owned


def nowhere() -> bool:
    """Return False in every thread."""
    return False


def _nothing() -> None:
    """Do nothing at a fork."""


def _end_on_return(loop: asyncio.AbstractEventLoop, why: str) -> None:
    """
    End this process, which was forked inside a callback of `loop`, when that callback returns.

    Callbacks that are already ready would run before a new one, so this one is put before them; a
    loop that is not asyncio's own has no such place.
    """
    ready = getattr(loop, "_ready", None)
    if ready is None:
        loop.call_soon(_end_child, why)
    else:
        ready.appendleft(asyncio.Handle(_end_child, (why,), loop))


def _end_child(why: str) -> NoReturn:
    """End a child without its finalizers, and without the parent's buffered output."""
    log.critical("process %d ends: %s", os.getpid(), UsageError(Reason.FORK_RETURNED, why))
    os._exit(os.EX_SOFTWARE)


class _Open:
    """The homes of this process; after a fork, those of its parents are kept for ever, so that none
    is finalized.
    """

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


def process_id() -> int:
    """Return the id of this process, which differs in a forked child."""
    return os.getpid()


def at_fork(call: Callable[[], None]) -> None:
    """Call a function in each child that this process forks from now on."""
    os.register_at_fork(after_in_child=call)


class NonCopyable:
    """Base of clients, which can be neither copied nor pickled."""

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise InvalidRequestError(
            f"{type(self).__name__} objects are neither copied nor pickled: make "
            f"another where it is used"
        )


class LoopBoundClient(NonCopyable, ABC):
    """Base of clients with a home; the end of `async with` closes them."""

    @abstractmethod
    async def close(self) -> None:
        """Close the client."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._note_error(error)
        finally:
            await self.close()

    def _note_error(self, error: BaseException | None) -> None:
        """Note that the client's block ends, with `error` if it is not None."""

    if not TYPE_CHECKING:  # for a type checker these are errors

        def __enter__(self) -> NoReturn:
            """Refuse a block without async. Raises TypeError."""
            raise TypeError(f"`with` does not open a {type(self).__name__}: {self._opening()}")

        def __exit__(self, *_: object) -> None:
            """Do nothing; it exists because Python looks for it first."""

        def __getattr__(self, name: str) -> NoReturn:
            advice = f": {self._opening()}" if name in _STARTS else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{advice}",
                name=name,
                obj=self,
            )

    def _opening(self) -> str:
        kind = type(self).__name__
        sync = (
            f"; without an event loop use keylane.sync.{kind}"
            if kind in {"Producer", "Consumer"}
            else ""
        )
        return f"`async with {kind}(...)` opens it, and the end of its block closes it{sync}"
