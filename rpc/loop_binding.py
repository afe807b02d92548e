"""Binds a client to the event loop and the process in which it is open. Calls from elsewhere are
refused.

    closed ⇄ open ──fork──▶ forked: permanently in the child, because the client's sockets and its
                               │       event loop belong to the parent
                               ╰─ forked inside that loop, and returning to it ─▶ the child exits

Invariants
    A client that is open while its process forks does nothing in the child, and none of its objects
    is finalized there: a finalizer would remove the parent's sockets from the selector that both
    processes share.
    No callback of the parent's event loop runs in the child, where it would read the parent's
    answers and send requests in the parent's name.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import RLock, get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from weakref import WeakSet

from ..protocol.errors import ClosedError, InvalidRequestError, Reason, UsageError

log = logging.getLogger("keylane")

ENDED_HINT = (
    "That event loop cannot run again: open the client again in the current one, with `async with`."
)
"""The hint in the UsageError for an event loop that has ended."""
SAME_THREAD_HINT = (
    "Open a client in each event loop, or use it in its own loop. pytest-asyncio runs each test in "
    "its own loop: a test that uses a fixture of a wider scope needs "
    "@pytest.mark.asyncio(loop_scope=...), and the fixture the same loop_scope."
)
"""The hint in the UsageError for another event loop in the same thread, which the call cannot
reach.
"""
NO_LOOP_HINT = (
    "Start the program with asyncio.run(...), or anyio.run(..., backend='asyncio'); without an "
    "event loop use keylane.sync."
)
"""The hint in the UsageError for a missing asyncio event loop."""
_LIFECYCLE_NAMES = frozenset({"start", "stop", "open", "connect"})
"""The names under which users of other libraries look for a method that opens or closes a
client.
"""
NO_THREAD = 0
"""An identifier that no thread has."""


class LoopBinding:
    """
    The event loop and the process in which a client is open.

    A check gets the running event loop, which costs a system call on Python 3.11. Methods that are
    called for each message therefore check only once for each batch.

    Args:
        client_kind: the kind of client, for error texts.
    """

    def __init__(self, client_kind: str) -> None:
        self._client_kind = client_kind
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread = NO_THREAD
        """The event loop's thread; a call from it needs no other check."""
        self._kept_alive: object = None
        self.on_fork: Callable[[], None] = _no_op
        """Called in a child process that was forked while the client was open."""
        self._forked = False
        self._process_id = 0
        """The id of the process in which the client was opened."""

    @property
    def is_open_here(self) -> bool:
        """True while the client is open in this process; False in the child of a fork."""
        return self._loop is not None

    @property
    def state(self) -> str:
        """The state as a word: "open", "closed", or "forked" in a child process that was forked
        while the client was open.
        """
        return "open" if self.is_open_here else "forked" if self._forked else "closed"

    def enter(self, kept_alive: object, on_fork: Callable[[], None]) -> None:
        """
        Open the client in the running event loop.

        Args:
            kept_alive: object that must not be finalized in a child of this process.
            on_fork: called in such a child.

        Raises:
            UsageError: the client is open already, the process was forked meanwhile, or no asyncio
                event loop is running.
        """
        self.check_not_forked()
        if self._loop is not None and not self._loop.is_closed():
            raise UsageError(Reason.ALREADY_OPEN, f"the {self._client_kind} is open already")
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            error = UsageError(
                Reason.OTHER_LOOP,
                f"a {self._client_kind} opens in a running event loop of asyncio, and there is "
                f"none; keylane does not run on trio",
            )
            error.hint = NO_LOOP_HINT
            raise error from None
        self.thread = get_ident()
        self._process_id = os.getpid()
        self._kept_alive = kept_alive
        self.on_fork = on_fork
        _open_loop_bindings.loop_bindings.add(self)

    def leave(self) -> None:
        """Close the client."""
        self._loop = self._kept_alive = None
        self.on_fork = _no_op
        self.thread = NO_THREAD

    def check(self) -> None:
        """
        Check that the client is open, and that the caller runs in its event loop.

        Raises:
            ClosedError: it is not open.
            UsageError: the caller runs elsewhere.
        """
        if asyncio._get_running_loop() is self._loop is not None:
            return  # in a forked child, `_loop` is None
        self.check_not_elsewhere()
        raise ClosedError(f"the {self._client_kind} is not open")

    def check_not_elsewhere(self) -> None:
        """Like `check`, but accept a closed client. Raises UsageError."""
        self.check_not_forked()
        if self._loop is not None and asyncio._get_running_loop() is not self._loop:
            self._refuse_loop(self._loop)

    def check_not_forked(self) -> None:
        """Raise UsageError in a child process that was forked while the client was open."""
        if self._forked:
            raise UsageError(
                Reason.FORKED, f"the {self._client_kind} was open when this process was forked"
            )

    def check_thread(self) -> None:
        """Like `check_not_elsewhere`, but faster: in the event loop's thread it does not get the
        loop.
        """
        if get_ident() != self.thread:
            self.check_not_elsewhere()

    def _refuse_loop(self, loop: asyncio.AbstractEventLoop) -> NoReturn:
        if loop.is_closed():
            ended_error = UsageError(
                Reason.OTHER_LOOP,
                f"the event loop in which the {self._client_kind} was opened has ended",
            )
            ended_error.hint = ENDED_HINT
            raise ended_error
        if self.thread != get_ident():
            raise UsageError(
                Reason.OTHER_LOOP, f"the {self._client_kind} was opened in another thread"
            )
        other_error = UsageError(
            Reason.OTHER_LOOP, f"the {self._client_kind} was opened in another event loop"
        )
        other_error.hint = SAME_THREAD_HINT
        raise other_error

    def mark_forked(self) -> None:
        """Mark the client as forked; called in the child process."""
        if self._loop is not None and self.thread == get_ident() and self._loop.is_running():
            _exit_when_callback_returns(
                self._loop, f"the {self._client_kind} is open in process {self._process_id}"
            )
        self._forked = True
        self._loop = None
        self.thread = NO_THREAD
        self.on_fork()


def make_thread_check() -> Callable[[], bool]:
    """
    Return a function that returns True only in this thread.

    It tests whether this thread holds a lock, as `threading.Condition` does, which takes 13 ns;
    comparing `get_ident` would take 40 ns.
    """
    lock = RLock()
    lock.acquire()
    is_owned: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]  # not in the stubs
    return is_owned


def never_in_thread() -> bool:
    """Return False in any thread."""
    return False


def _no_op() -> None:
    """Do nothing."""


def _exit_when_callback_returns(loop: asyncio.AbstractEventLoop, reason: str) -> None:
    """
    Exit this process, which was forked inside a callback of `loop`, when that callback returns.

    Callbacks that are ready would run before a new one, so the exit is put before them; only
    asyncio's own event loop allows that.
    """
    ready = getattr(loop, "_ready", None)
    if ready is None:
        loop.call_soon(_exit_child, reason)
    else:
        ready.appendleft(asyncio.Handle(_exit_child, (reason,), loop))


def _exit_child(reason: str) -> NoReturn:
    """Exit a child process without running finalizers or writing the parent's buffered output."""
    log.critical("process %d ends: %s", os.getpid(), UsageError(Reason.FORK_RETURNED, reason))
    os._exit(os.EX_SOFTWARE)


class _OpenLoopBindings:
    """The loop bindings that are open in this process; those of the parent are kept forever after a
    fork, so that they are never finalized.
    """

    def __init__(self) -> None:
        self.loop_bindings: WeakSet[LoopBinding] = WeakSet()
        self._parent_loop_bindings: list[LoopBinding] = []

    def after_fork(self) -> None:
        """Mark all open clients as forked; called in the child process."""
        for loop_binding in self.loop_bindings:
            if loop_binding.is_open_here:
                loop_binding.mark_forked()
                self._parent_loop_bindings.append(loop_binding)
        self.loop_bindings = WeakSet()


_open_loop_bindings = _OpenLoopBindings()
os.register_at_fork(after_in_child=_open_loop_bindings.after_fork)


def process_id() -> int:
    """Return the id of this process, which differs in a forked child."""
    return os.getpid()


def at_fork(callback: Callable[[], None]) -> None:
    """Register a function to call in each child process that is forked from now on."""
    os.register_at_fork(after_in_child=callback)


class _PublicSignature:
    """The signature that `help` shows for a class: without types, which the documentation of the
    arguments has, and without internal parameters.
    """

    def __get__(self, _instance: object, owner: type) -> inspect.Signature:
        _self, *parameters = inspect.signature(owner.__init__).parameters.values()  # type: ignore[misc]
        return inspect.Signature(
            [
                parameter.replace(annotation=inspect.Parameter.empty)
                for parameter in parameters
                if not parameter.name.startswith("_")
            ]
        )


class NonCopyable:
    """Base class for clients, which can be neither copied nor pickled."""

    __signature__ = _PublicSignature()

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise InvalidRequestError(
            f"{type(self).__name__} objects are neither copied nor pickled: "
            f"create another where it is used"
        )

    _method_hints: ClassVar[dict[str, str]] = {}
    """Method names from other libraries, with the equivalent here."""

    if not TYPE_CHECKING:  # for a type checker these are errors

        def __getattr__(self, name: str) -> NoReturn:
            advice = self._opening() if name in _LIFECYCLE_NAMES else self._method_hints.get(name)
            # Next to advice, Python would suggest a private attribute of `obj`.
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
                + (f": {advice}" if advice else ""),
                name=name,
                obj=None if advice else self,
            )

        async def __aenter__(self) -> NoReturn:
            """Refuse `async with`. Raises TypeError."""
            raise TypeError(
                f"`async with` does not open a {type(self).__name__}: {self._opening()}"
            )

        async def __aexit__(self, *_: object) -> None:
            """Do nothing; without it, Python would not call `__aenter__`."""

    def _opening(self) -> str:
        return "`with`, or open(), opens it, and the end of the block, or close(), closes it"


class LoopBoundClient(NonCopyable, ABC):
    """Base class for clients that are bound to an event loop; leaving `async with` closes them."""

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
        """Called when the `async with` block ends, with the error that ended it, or None."""

    if not TYPE_CHECKING:  # for a type checker these are errors

        def __enter__(self) -> NoReturn:
            """Refuse `with` without `async`. Raises TypeError."""
            raise TypeError(f"`with` does not open a {type(self).__name__}: {self._opening()}")

        def __exit__(self, *_: object) -> None:
            """Do nothing; without it, Python would not call `__enter__`."""

    def _opening(self) -> str:
        kind = type(self).__name__
        sync = (
            f"; without an event loop use keylane.sync.{kind}"
            if kind in {"Producer", "Consumer"}
            else ""
        )
        return f"`async with {kind}(...)` opens it, and the end of its block closes it{sync}"
