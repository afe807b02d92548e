"""An event loop on a thread of its own, on which programs without one run a client.

    caller's thread ── run(work) ──▶ loop of the thread ── result or error ──▶ caller's thread

Invariants
    What `run` was given before `stop` ends before the thread does: done, or cancelled.
    The client is closed before its loop ends, whatever was interrupted: otherwise its group would wait for its ttl.
    A `stop` that was interrupted goes on; `start` waits for its end.
    What ends a program, raised on the loop by a callback of the user, as by `sys.exit()`, ends no loop with a client open on it.
    In a forked child nothing runs: the thread is the parent's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from ..protocol.errors import AlreadyOpenError, ClosedError, InvalidRequestError, OtherLoopError
from ..rpc.home import Home

T = TypeVar("T")
HINT = "Use it inside its `with` block, or between `open()` and `close()`."
"""Of a ClosedError, for programs without an event loop."""
OWN_LOOP_HINT = "Call it from another thread: its event loop would wait for itself."
"""Of an OtherLoopError, in a callback that the client's own thread runs."""
SHARED_THREAD_HINT = (
    "Only one client of keylane.sync runs where gevent has patched threads; greenlets may share it.  "
    "For several run the program with real threads, as gunicorn --worker-class gthread does."
)
"""Of an OtherLoopError, where a patched `threading` gives no thread of the system."""

NO_THREAD_HINT = (
    "Once the main thread has ended, Python starts no thread: open the client before, and end the main thread last.  "
    "Or the process has as many threads as the system allows."
)
"""Of an OtherLoopError, where no thread starts."""


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
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """None while nothing may be run."""
        self._stop = asyncio.Event()
        self._stopping = False
        """`stop` was called: the thread ends, or has ended."""

    @property
    def state(self) -> str:
        """For people: "open", "closed" or "forked"."""
        return self._home.state

    @property
    def forked(self) -> bool:
        """True in a child of the process in which the thread runs."""
        return self._home.state == "forked"

    def start(self) -> None:
        """
        Start the thread, and wait until its loop runs.

        Raises:
            AlreadyOpenError, ForkedError
            OtherLoopError: threads are greenlets, as gevent patches them, and another event loop runs in theirs.
            OtherLoopError: also where there is no thread to be had; it may be started again.
            OSError: the system gives no event loop, as without a free file descriptor; it may be started again.
        """
        self._home.check_not_forked()
        ready: Future[None] = Future()
        with self._lock:
            if self._thread is not None:
                if not self._stopping:
                    raise AlreadyOpenError(f"the {self._what} is open already")
                self._thread.join()  # the wait of its `stop` was interrupted, as by Ctrl-C
            self._stopping = False
            self._thread = threading.Thread(
                target=self._run, args=(ready,), name=f"keylane {self._what}", daemon=True
            )
            try:
                self._start(self._thread)
                ready.result()
            except Exception:
                self._thread = None
                raise
            except BaseException:  # an interrupt, as Ctrl-C: a thread that began ends
                self._abandon(ready)
                raise

    def _start(self, thread: threading.Thread) -> None:
        """Raises OtherLoopError: the system, or an interpreter that ends, gives no thread."""
        try:
            thread.start()
        except RuntimeError as error:
            none = OtherLoopError(f"the {self._what} needs a thread for its event loop: {error}")
            none.hint = NO_THREAD_HINT
            raise none from error

    def _abandon(self, ready: Future[None]) -> None:
        """End the thread whose start was interrupted."""
        if ready.cancel():
            self._thread = None  # it ends before it has a loop
            return
        try:
            with suppress(Exception):  # there is no loop, and the thread ends
                ready.result()
        finally:  # also after a second interrupt
            self._end_loop()

    def _run(self, ready: Future[None]) -> None:
        served = False
        try:
            _check_own_thread(self._what)
            with asyncio.Runner() as runner:
                self._run_to_the_end(runner.get_loop(), ready)
                served = True
        except Exception as error:
            if served and not threading.main_thread().is_alive():
                return  # the loop is closed; from Python 3.12 on a pool of threads that it had asks for one more to end
            if ready.done():
                raise
            ready.set_exception(error)  # there is no loop, as without a free file descriptor

    def _run_to_the_end(self, loop: asyncio.AbstractEventLoop, ready: Future[None]) -> None:
        """Run `_serve`; the loop goes on, for it to close the client, after an error that stops a loop."""
        serving = loop.create_task(self._serve(ready))
        while not serving.done():
            try:
                loop.run_until_complete(serving)
            except (SystemExit, KeyboardInterrupt):
                log = logging.getLogger(f"keylane.{self._what}")
                log.exception("the %s is closed: a callback on its event loop ended", self._what)
                self._end_loop_here()

    async def _serve(self, ready: Future[None]) -> None:
        if not ready.set_running_or_notify_cancel():
            return  # its start was interrupted
        self._home.enter(self, lambda: None)
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        ready.set_result(None)
        await self._stop.wait()
        if self._end is not None:
            try:
                await self._end()
            except Exception:
                log = logging.getLogger(f"keylane.{self._what}")
                log.exception("the %s was stopped, and closing it failed", self._what)
        self._home.leave()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None = None) -> T:
        """
        Run `work()` on the loop, and return its result; KeyboardInterrupt and a time-out cancel it.

        Raises:
            InvalidRequestError: `timeout_s` is no number of seconds; nothing was run.
            ClosedError, ForkedError: the thread does not run, or is stopped meanwhile.
            OtherLoopError: called on the thread itself, which would wait for ever.
            TimeoutError: it took longer than `timeout_s` seconds.
            BaseException: raised by the work.
        """
        _check_seconds(timeout_s)
        self._home.check_not_forked()
        self.check_caller()
        with self._lock:
            if self._loop is None:
                raise _for_threads(ClosedError(f"the {self._what} is not open"))
            future = asyncio.run_coroutine_threadsafe(_outcome(work), self._loop)
        try:
            outcome = future.result(timeout_s)
            if isinstance(outcome, _Exit):
                raise outcome.error
            return outcome
        except CancelledError:
            raise _for_threads(ClosedError(f"the {self._what} was closed meanwhile")) from None
        except ClosedError as error:
            _for_threads(error)
            raise
        except BaseException as error:
            if isinstance(error, TimeoutError) and not error.args and not future.done():
                error.args = (f"the {self._what} has not done it within {timeout_s:g} s",)
            future.cancel()
            raise

    def check_caller(self) -> None:
        """Raises OtherLoopError: called on the thread itself, as by a codec or a filter, which would wait for its own end."""
        if threading.current_thread() is self._thread:
            error = OtherLoopError(f"the {self._what} is called on its own event loop")
            error.hint = OWN_LOOP_HINT
            raise error

    def post(self, call: Callable[[], None]) -> None:
        """Call `call` on the loop, soon, behind what `run` was given; nothing once the thread is stopped."""
        if self.forked:
            return  # another thread may have held the lock at the fork, for good
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call)

    def stop(self) -> None:
        """
        Close the client, cancel what still runs, and wait for the end of the thread.  Does nothing in a forked child.

        An interrupt ends the wait alone.

        Raises:
            OtherLoopError: called on the thread itself; nothing was stopped.
        """
        if self.forked:
            return
        self.check_caller()
        with self._lock:
            thread = self._thread
            self._end_loop()
        if thread is not None:
            thread.join()
            with self._lock:
                if self._thread is thread:
                    self._thread = None

    def _end_loop_here(self) -> None:
        """As `_end_loop`, on the thread itself: a `start` that waits for its end has the lock, and the loop is ending then."""
        while self._loop is not None:
            if self._lock.acquire(timeout=0.01):
                try:
                    self._end_loop()
                finally:
                    self._lock.release()

    def _end_loop(self) -> None:
        self._stopping = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._loop = None


class _Exit:
    """What ends a program, raised by the work."""

    def __init__(self, error: SystemExit | KeyboardInterrupt) -> None:
        self.error = error


async def _outcome(work: Callable[[], Coroutine[Any, Any, T]]) -> T | _Exit:
    """The result of the work.  What ends a program, as `sys.exit()` in a codec, is for the caller: raised here, it would stop the loop."""
    try:
        return await work()
    except (SystemExit, KeyboardInterrupt) as error:
        return _Exit(error)


def _check_own_thread(what: str) -> None:
    """Raises OtherLoopError: an event loop runs in this new thread, so that it is none of the system's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    error = OtherLoopError(
        f"the {what} needs a thread for its event loop; threads of this program are greenlets of one "
        "thread, in which another event loop runs"
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
    if not number or not 0 <= timeout_s <= threading.TIMEOUT_MAX:  # type: ignore[operator]  # it is a number
        raise InvalidRequestError(
            f"a time-out is seconds from 0, or None for as long as it takes, not {timeout_s!r:.40}"
        )
