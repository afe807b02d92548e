"""An event loop on a thread of its own, on which programs without an event loop run a client.

    caller's thread ── run(work) ──▶ loop of the thread ── result or error ──▶ caller's thread

Invariants
    All work that was given to `run` before `stop` is done or cancelled before the thread ends.
    The client is closed before its loop ends, whatever was interrupted: otherwise its group would
    wait for its ttl to expire.
    A `stop` that was interrupted continues; `start` waits for its end.
    If a callback of the user ends the program, for example with `sys.exit()`, the client is closed
    before the loop ends.
    In a forked child nothing runs, because the thread exists only in the parent.
    No thread holds a lock that another thread needs. A signal handler may interrupt its thread
    anywhere and call this module, and so may finalizers and log handlers. So each caller waits at
    a lock of its own, which the loop releases without waiting.

Calls that are made when this process ends, so that an open client is closed.

A forked child of `multiprocessing` calls no functions of `atexit` before Python 3.13. It does call
the finalizers of `multiprocessing`, unless it ends by `os._exit` or a signal.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from threading import get_ident
from typing import Any, Generic, TypeVar

from ..protocol.errors import ClosedError, InvalidRequestError, Reason, UsageError
from ..rpc.home import Home, process_id
from . import loop_logs

T = TypeVar("T")
HINT = "Use it inside its `with` block, or between `open()` and `close()`."
"""The hint of a ClosedError, for programs without an event loop."""
OWN_LOOP_HINT = "Call it from another thread: its event loop would wait for itself."
"""The hint of a UsageError in a callback that runs on the client's own thread."""
SHARED_THREAD_HINT = (
    "Where gevent has patched threads, only one client of keylane.sync can run; greenlets may "
    "share it. To run several clients, use real threads, for example with gunicorn "
    "--worker-class gthread."
)
"""The hint of a UsageError where a patched `threading` starts no real thread."""

NO_THREAD_HINT = (
    "Python starts no thread after the main thread has ended: open the client earlier, and end the "
    "main thread last. Or the process has reached the system's limit of threads."
)
"""The hint of a UsageError when no thread could be started."""


class _Gate:
    """A gate at which one thread waits until another thread opens it; opening never blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_open = False

    def open(self) -> None:
        """Wake the waiting thread; only one thread may call this."""
        if not self.is_open:
            self.is_open = True
            self._lock.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the gate is open; return False after the time-out."""
        return self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s)


class _Call(Generic[T]):
    """Work that the loop does for a caller."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.gate = _Gate()
        self._work = work
        self._task: asyncio.Task[T | _Exit] | None = None
        """The task of the work. When the gate is open, it is done, or None if it never began."""

    def begin(self, life: _Life) -> None:
        """Begin the work, on the loop."""
        if life.stopping:
            self.gate.open()
            return
        self._task = asyncio.get_running_loop().create_task(_outcome(self._work))
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[T | _Exit]) -> None:
        if not task.cancelled():
            task.exception()  # it is known, though a caller that was interrupted may never ask
        self.gate.open()

    def cancel(self) -> None:
        """Cancel the work, on the loop."""
        if self._task is not None:
            self._task.cancel()

    def result(self) -> T:
        """Return the result of the work, or raise CancelledError if it did not end."""
        if self._task is None or not self._task.done():
            raise asyncio.CancelledError
        outcome = self._task.result()
        if isinstance(outcome, _Exit):
            raise outcome.error
        return outcome


class _Life:
    """One run of the thread and its loop, from start to end."""

    def __init__(self, run: Callable[[_Life], None], name: str) -> None:
        self.thread = threading.Thread(target=run, args=(self,), name=name, daemon=True)
        self.ident = 0
        """The id of the thread; 0 until it runs."""
        self.begun = _Gate()
        """A gate that opens when the loop runs, or has failed to start."""
        self.error: Exception | None = None
        """The reason why the loop did not start."""
        self.stopping = False
        """True when no more work is accepted: the thread is ending, or has ended."""
        self.ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._gates: set[_Gate] = set()
        """The gates of callers who wait."""
        self._serves = threading.Lock()
        """A lock that is acquired once, without waiting: by the thread when it begins to serve, or
        by a starter that was interrupted before.
        """
        self._is_joined = False
        self._process_id = process_id()

    # ── on the thread ─────────────────────────────────────────────────────────────────────────────
    def take(self) -> bool:
        """Return True for the first caller: the thread, which then serves, or its starter, which
        has given it up.
        """
        return self._serves.acquire(blocking=False)

    async def until_stopped(self) -> None:
        """Accept posted work until `stop`."""
        self._loop = asyncio.get_running_loop()
        self.begun.open()
        if not self.stopping:  # if it becomes so from now on, `stop` sees the loop
            await self._stop.wait()

    def end(self) -> None:
        """Note that the loop has ended, and wake all callers who wait."""
        self.stopping = self.ended = True
        for gate in list(self._gates):
            gate.open()
        self.begun.open()

    # ── on any thread ─────────────────────────────────────────────────────────────────────────────
    def post(self, call: Callable[..., object], *args: object) -> None:
        """Let the loop call `call(*args)`; do nothing if it has ended."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call, *args)

    def wait(self, gate: _Gate, timeout_s: float | None = None) -> bool:
        """Wait until the gate is open or the thread has ended; return False after the time-out."""
        self._gates.add(gate)
        try:
            return self.ended or gate.wait(timeout_s)  # what comes behind this look, `end` opens
        finally:
            self._gates.discard(gate)

    def stop(self) -> None:
        """Let the thread end."""
        self.stopping = True
        self.post(self._stop.set)

    def wait_end(self) -> None:
        """Wait until the thread has ended; return at once in a forked child."""
        if process_id() != self._process_id:
            return
        self.wait(_Gate())
        if not self._is_joined:  # a signal handler waits for no `join` that it interrupts
            self._is_joined = True
            self.thread.join()


class LoopThread:
    """
    A daemon thread with an event loop; callers in other threads run work on it and wait for the
    result.

    Args:
        what: the kind of client that runs there, for the texts of errors.
        end: closes the client, if it is open; it is the last work on the loop.
    """

    def __init__(
        self, what: str, *, end: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        self._what = what
        self._end = end
        self._home = Home(what)
        self._life: _Life | None = None
        """The run that was started last."""
        self._starts = threading.Lock()
        """A lock that a starter holds, and that no thread waits for."""

    @property
    def state(self) -> str:
        """One of "open", "closed" and "forked"."""
        if self.forked:
            return "forked"
        return "open" if self._life is not None and not self._life.stopping else "closed"

    @property
    def forked(self) -> bool:
        """True in a child of the process in which the thread runs."""
        return self._home.state == "forked"

    def start(self) -> None:
        """
        Start the thread, and wait until its loop runs.

        Raises:
            UsageError
            UsageError: gevent has patched threads, so they are greenlets of one thread, which
                already runs an event loop; or no thread could be started, and `start` may be called
                again.
            OSError: no event loop could be created, for example because no file descriptor is free;
                `start` may be called again.
        """
        self._home.check_not_forked()
        if not self._starts.acquire(blocking=False):
            raise UsageError(Reason.ALREADY_OPEN, f"the {self._what} is being opened already")
        try:
            if self._life is not None:
                if not self._life.stopping:
                    raise UsageError(Reason.ALREADY_OPEN, f"the {self._what} is open already")
                self.check_caller()
                self._life.wait_end()
            self._life = self._started()
        finally:
            self._starts.release()

    def _started(self) -> _Life:
        life = _Life(self._run, f"keylane {self._what}")
        try:
            self._start(life.thread)
            life.begun.wait()
        except UsageError:
            raise
        except BaseException:  # an interrupt, as Ctrl-C: a thread that began ends
            if not life.take():
                self._life = life  # the next start waits for its end
                life.stop()
            raise
        if life.error is not None:
            raise life.error
        return life

    def _start(self, thread: threading.Thread) -> None:
        """Start the thread; raise UsageError if the system or an ending interpreter refuses."""
        try:
            loop_logs.LOGS.start()
            thread.start()
        except RuntimeError as error:
            none = UsageError(
                Reason.OTHER_LOOP, f"the {self._what} needs a thread for its event loop: {error}"
            )
            none.hint = NO_THREAD_HINT
            raise none from error

    def _run(self, life: _Life) -> None:
        served = False
        life.ident = get_ident()
        try:
            _check_own_thread(self._what)
            loop_logs.LOGS.enter()
            with asyncio.Runner() as runner:
                self._run_to_the_end(runner.get_loop(), life)
                served = True
        except Exception as error:
            if served and not threading.main_thread().is_alive():
                # the loop is closed; from Python 3.12 on a pool of threads that it had asks for one
                # more to end
                return
            if life.begun.is_open:
                raise
            life.error = error  # there is no loop, as without a free file descriptor
        finally:
            loop_logs.LOGS.leave()
            life.end()

    def _run_to_the_end(self, loop: asyncio.AbstractEventLoop, life: _Life) -> None:
        """Run `_serve` to its end: after an error that stops the loop, continue so that it closes
        the client.
        """
        serving = loop.create_task(self._serve(life))
        while not serving.done():
            try:
                loop.run_until_complete(serving)
            except (SystemExit, KeyboardInterrupt):
                log = logging.getLogger(f"keylane.{self._what}")
                log.exception("closing the %s, because a callback ended its event loop", self._what)
                life.stop()

    async def _serve(self, life: _Life) -> None:
        if not life.take():
            return  # its start was interrupted
        self._home.enter(self, lambda: None)
        await life.until_stopped()
        if self._end is not None:
            try:
                await self._end()
            except Exception:
                log = logging.getLogger(f"keylane.{self._what}")
                log.exception("the %s could not be closed when it was stopped", self._what)
        self._home.leave()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None = None) -> T:
        """
        Run `work()` on the loop and return its result; KeyboardInterrupt and a time-out cancel it.

        Raises:
            InvalidRequestError: `timeout_s` is no number of seconds; nothing was run.
            ClosedError, UsageError: the thread does not run, or was stopped during the work.
            UsageError: the call was made on the thread itself, which would wait forever.
            TimeoutError: the work took longer than `timeout_s` seconds.
            BaseException: the work raised it.
        """
        _check_seconds(timeout_s)
        self._home.check_not_forked()
        self.check_caller()
        life = self._life
        if life is None or life.stopping:
            raise _for_threads(ClosedError(f"the {self._what} is not open"))
        call = _Call(work)
        try:
            life.post(call.begin, life)
            if not life.wait(call.gate, timeout_s):
                raise TimeoutError(f"the {self._what} has not done it within {timeout_s:g} s")
            return call.result()
        except asyncio.CancelledError:
            raise _for_threads(ClosedError(f"the {self._what} was closed meanwhile")) from None
        except ClosedError as error:
            _for_threads(error)
            raise
        except BaseException:
            life.post(call.cancel)
            raise

    def check_caller(self) -> None:
        """Raise UsageError if the thread itself makes the call, for example in a codec or a
        filter: it would wait for itself.
        """
        if self._life is not None and self._life.ident == get_ident() and not self._life.ended:
            error = UsageError(
                Reason.OTHER_LOOP, f"the {self._what} is called on its own event loop"
            )
            error.hint = OWN_LOOP_HINT
            raise error

    def post(self, call: Callable[[], None]) -> None:
        """Call `call` on the loop soon, after the work that `run` was given; do nothing once the
        thread is stopping.
        """
        if self._life is not None and not self._life.stopping and not self.forked:
            self._life.post(call)

    def stop(self) -> None:
        """
        Close the client, cancel the remaining work, and wait until the thread has ended.

        In a forked child this does nothing. An interrupt ends only the wait.

        Raises:
            UsageError: the thread itself made the call; nothing was stopped.
        """
        life = self._life
        if life is None or self.forked:
            return
        self.check_caller()
        life.stop()
        life.wait_end()
        loop_logs.LOGS.settle()


class _Exit:
    """The result of work that raised an error which ends a program."""

    def __init__(self, error: SystemExit | KeyboardInterrupt) -> None:
        self.error = error


async def _outcome(work: Callable[[], Coroutine[Any, Any, T]]) -> T | _Exit:
    """
    Return the result of the work.

    An error that ends a program, for example of `sys.exit()` in a codec, is returned for the caller
    to raise; raised here, it would stop the loop.
    """
    try:
        return await work()
    except (SystemExit, KeyboardInterrupt) as error:
        return _Exit(error)


def _check_own_thread(what: str) -> None:
    """Raise UsageError if an event loop already runs in this new thread, which is then no real
    thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    error = UsageError(
        Reason.OTHER_LOOP,
        f"the {what} needs a thread for its event loop; threads of this program are greenlets of "
        "one thread, in which another event loop runs",
    )
    error.hint = SHARED_THREAD_HINT
    raise error


def _for_threads(error: ClosedError) -> ClosedError:
    if error.hint == ClosedError.hint:
        error.hint = HINT
    return error


def _check_seconds(timeout_s: object) -> None:
    """Raise InvalidRequestError unless the time-out is None, or seconds that a thread can wait."""
    if timeout_s is None:
        return
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    # it is a number
    if not number or not 0 <= timeout_s <= threading.TIMEOUT_MAX:  # type: ignore[operator]
        raise InvalidRequestError(
            f"a time-out is seconds from 0, or None for as long as it takes, not {timeout_s!r:.40}"
        )


class AtProcessEnd:
    """
    A call that is made once at the end of this process, if it is switched `on`.

    Args:
        call: the function to call; it must do nothing in a forked child.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._finalizer: Any = None
        """The finalizer in a child of `multiprocessing`; elsewhere None."""

    def on(self) -> None:
        """Let the call be made at the end of the process."""
        atexit.register(self._make)
        # A child of `multiprocessing` has imported both modules; other programs need neither.
        process = sys.modules.get("multiprocessing.process")
        if process is not None and process.parent_process() is not None:
            from multiprocessing.util import Finalize

            self._finalizer = Finalize(None, self._make, exitpriority=0)

    def off(self) -> None:
        """Let the call not be made."""
        atexit.unregister(self._make)
        if self._finalizer is not None:
            self._finalizer.cancel()
            self._finalizer = None

    def _make(self) -> None:
        self.off()  # a spawned child also calls the functions of atexit
        self._call()
