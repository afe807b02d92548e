"""An event loop on a thread of its own, on which programs without one run a client.

    caller's thread ── run(work) ──▶ loop of the thread ── result or error ──▶ caller's thread

Invariants
    What `run` was given before `stop` ends before the thread does: done, or cancelled.
    The client is closed before its loop ends, whatever was interrupted: otherwise its group would
    wait for its ttl. A `stop` that was interrupted goes on; `start` waits for its end. What ends a
    program, raised on the loop by a callback of the user, as by `sys.exit()`, ends no loop with a
    client open on it. In a forked child nothing runs: the thread is the parent's. No thread holds a
    lock that another one needs.  A signal handler interrupts its thread anywhere, and may call
    here, as may a finalizer and a handler of the log: so a caller waits at a lock of its own, which
    the loop opens without waiting.
"""

from __future__ import annotations

import asyncio
import logging
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
"""Of a ClosedError, for programs without an event loop."""
OWN_LOOP_HINT = "Call it from another thread: its event loop would wait for itself."
"""Of an UsageError, in a callback that the client's own thread runs."""
SHARED_THREAD_HINT = (
    "Only one client of keylane.sync runs where gevent has patched threads; "
    "greenlets may share it.  "
    "For several run the program with real threads, as gunicorn --worker-class gthread does."
)
"""Of an UsageError, where a patched `threading` gives no thread of the system."""

NO_THREAD_HINT = (
    "Once the main thread has ended, Python starts no thread: open the client before, and end the "
    "main thread last.  "
    "Or the process has as many threads as the system allows."
)
"""Of an UsageError, where no thread starts."""


class _Gate:
    """What one thread waits for and another one opens, which never waits for that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_open = False

    def open(self) -> None:
        """Let the thread that waits go on; called in one thread alone."""
        if not self.is_open:
            self.is_open = True
            self._lock.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is open; False after the time-out."""
        return self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s)


class _Call(Generic[T]):
    """Work that the loop is to do for a caller."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.gate = _Gate()
        self._work = work
        self._task: asyncio.Task[T | _Exit] | None = None
        """Ended, or never begun, once the gate is open."""

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
        """What became of the work.  Raises CancelledError: it was cancelled, or never begun."""
        if self._task is None or not self._task.done():
            raise asyncio.CancelledError
        outcome = self._task.result()
        if isinstance(outcome, _Exit):
            raise outcome.error
        return outcome


class _Life:
    """A thread with its loop, from its start to its end."""

    def __init__(self, run: Callable[[_Life], None], name: str) -> None:
        self.thread = threading.Thread(target=run, args=(self,), name=name, daemon=True)
        self.ident = 0
        """Of the thread; 0 before it runs."""
        self.begun = _Gate()
        """Opened when the loop runs, or cannot."""
        self.error: Exception | None = None
        """Why there is no loop."""
        self.stopping = False
        """Nothing more is run, and the thread ends, or has ended."""
        self.ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._gates: set[_Gate] = set()
        """Of callers who wait."""
        self._serves = threading.Lock()
        """Taken once, and never waited for: by the thread that begins to serve, or by a starter who
        gave it up before.
        """
        self._is_joined = False
        self._process_id = process_id()

    # ── on the thread ─────────────────────────────────────────────────────────────────────────────
    def take(self) -> bool:
        """True for the first who asks: the thread is to serve, or its starter has given it up."""
        return self._serves.acquire(blocking=False)

    async def until_stopped(self) -> None:
        """Let work be posted, until `stop`."""
        self._loop = asyncio.get_running_loop()
        self.begun.open()
        if not self.stopping:  # if it becomes so from now on, `stop` sees the loop
            await self._stop.wait()

    def end(self) -> None:
        """The thread has no loop any more: let everyone go on who waits."""
        self.stopping = self.ended = True
        for gate in list(self._gates):
            gate.open()
        self.begun.open()

    # ── on any thread ─────────────────────────────────────────────────────────────────────────────
    def post(self, call: Callable[..., object], *args: object) -> None:
        """Have the loop call `call(*args)`; nothing if it has ended."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call, *args)

    def wait(self, gate: _Gate, timeout_s: float | None = None) -> bool:
        """Wait until the gate is open, or the thread has ended; False after the time-out."""
        self._gates.add(gate)
        try:
            return self.ended or gate.wait(timeout_s)  # what comes behind this look, `end` opens
        finally:
            self._gates.discard(gate)

    def stop(self) -> None:
        """Have the thread end."""
        self.stopping = True
        self.post(self._stop.set)

    def wait_end(self) -> None:
        """Wait until the thread has ended; in a forked child it has."""
        if process_id() != self._process_id:
            return
        self.wait(_Gate())
        if not self._is_joined:  # a signal handler waits for no `join` that it interrupts
            self._is_joined = True
            self.thread.join()


class LoopThread:
    """
    A daemon thread with an event loop; callers in other threads wait for what they run on it.

    Args:
        what: the kind of client that runs there, as errors name it.
        end: closes the client, if it is open; awaited as the last work on the loop.
    """

    def __init__(
        self, what: str, *, end: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        self._what, self._end = what, end
        self._home = Home(what)
        self._life: _Life | None = None
        """The last one that was started."""
        self._starts = threading.Lock()
        """Held by who starts it, and never waited for."""

    @property
    def state(self) -> str:
        """For people: "open", "closed" or "forked"."""
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
            UsageError: threads are greenlets, as gevent patches them, and another event loop
            runs in theirs. UsageError: also where there is no thread to be had; it may be
            started again. OSError: the system gives no event loop, as without a free file
            descriptor; it may be started again.
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
        """Raises UsageError: the system, or an interpreter that ends, gives no thread."""
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
        """Run `_serve`; the loop goes on, for it to close the client, after an error that stops a
        loop.
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
                log.exception("the %s was stopped, and could not be closed", self._what)
        self._home.leave()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None = None) -> T:
        """
        Run `work()` on the loop, and return its result; KeyboardInterrupt and a time-out cancel it.

        Raises:
            InvalidRequestError: `timeout_s` is no number of seconds; nothing was run.
            ClosedError, UsageError: the thread does not run, or is stopped meanwhile.
            UsageError: called on the thread itself, which would wait for ever.
            TimeoutError: it took longer than `timeout_s` seconds.
            BaseException: raised by the work.
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
        """Raises UsageError: called on the thread itself, as by a codec or a filter, which
        would wait for its own end.
        """
        if self._life is not None and self._life.ident == get_ident() and not self._life.ended:
            error = UsageError(
                Reason.OTHER_LOOP, f"the {self._what} is called on its own event loop"
            )
            error.hint = OWN_LOOP_HINT
            raise error

    def post(self, call: Callable[[], None]) -> None:
        """Call `call` on the loop, soon, behind what `run` was given; nothing once the thread is
        stopped.
        """
        if self._life is not None and not self._life.stopping and not self.forked:
            self._life.post(call)

    def stop(self) -> None:
        """
        Close the client, cancel what still runs, and wait for the end of the thread.  Does nothing
        in a forked child.

        An interrupt ends the wait alone.

        Raises:
            UsageError: called on the thread itself; nothing was stopped.
        """
        life = self._life
        if life is None or self.forked:
            return
        self.check_caller()
        life.stop()
        life.wait_end()
        loop_logs.LOGS.settle()


class _Exit:
    """What ends a program, raised by the work."""

    def __init__(self, error: SystemExit | KeyboardInterrupt) -> None:
        self.error = error


async def _outcome(work: Callable[[], Coroutine[Any, Any, T]]) -> T | _Exit:
    """The result of the work.  What ends a program, as `sys.exit()` in a codec, is for the caller:
    raised here, it would stop the loop.
    """
    try:
        return await work()
    except (SystemExit, KeyboardInterrupt) as error:
        return _Exit(error)


def _check_own_thread(what: str) -> None:
    """Raises UsageError: an event loop runs in this new thread, so that it is none of the
    system's.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    error = UsageError(
        Reason.OTHER_LOOP,
        f"the {what} needs a thread for its event loop; threads of this program "
        f"are greenlets of one "
        "thread, in which another event loop runs",
    )
    error.hint = SHARED_THREAD_HINT
    raise error


def _for_threads(error: ClosedError) -> ClosedError:
    if error.hint == ClosedError.hint:
        error.hint = HINT
    return error


def _check_seconds(timeout_s: object) -> None:
    """Raises InvalidRequestError: neither None nor seconds that a thread can wait."""
    if timeout_s is None:
        return
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    # it is a number
    if not number or not 0 <= timeout_s <= threading.TIMEOUT_MAX:  # type: ignore[operator]
        raise InvalidRequestError(
            f"a time-out is seconds from 0, or None for as long as it takes, not {timeout_s!r:.40}"
        )
