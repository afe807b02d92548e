"""Runs a client on an event loop in a separate thread, for programs without an event loop, and
closes the client when the process ends.

    caller's thread ── run(work) ──▶ the thread's loop ── result or error ──▶ caller's thread

Invariants
    All work that was passed to `run` before `stop` is done or cancelled before the thread ends. The
    client is closed before its loop ends, even after an interrupt; otherwise its group would wait
    for its ttl to expire. An interrupted `stop` continues in the background, and `start` waits
    until it has ended. If a user's callback ends the program, for example with `sys.exit()`, the
    client is closed before the loop ends. In a forked child nothing runs, because the thread exists
    only in the parent. No thread holds a lock that another thread needs. Signal handlers,
    finalizers and log handlers may interrupt a thread at any point and call this module. Each
    caller therefore waits for its own lock, which the loop releases without waiting.
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
from ..rpc.loop_binding import LoopBinding, process_id
from . import loop_logs

T = TypeVar("T")
HINT = "Use it inside its `with` block, or between `open()` and `close()`."
"""The hint of a ClosedError."""
OWN_LOOP_HINT = "Call it from another thread: its event loop would wait for itself."
"""The hint of a UsageError for a call on the client's own thread, for example in a codec."""
SHARED_THREAD_HINT = (
    "Where gevent has patched threads, only one client of keylane.sync can run; greenlets may "
    "share it. To run several clients, use real threads, for example with gunicorn "
    "--worker-class gthread."
)
"""The hint of a UsageError if `threading` is patched so that it does not start real threads."""

NO_THREAD_HINT = (
    "Python starts no thread after the main thread has ended: open the client earlier, and end the "
    "main thread last. Or the process has reached the system's limit of threads."
)
"""The hint of a UsageError if no thread could be started."""


class _Gate:
    """Lets one thread wait until another opens the gate; opening never blocks."""

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
        """Wait until the gate is open. Return False on a timeout."""
        return self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s)


class _LoopCall(Generic[T]):
    """Runs a caller's work on the loop."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.gate = _Gate()
        self._work = work
        self._task: asyncio.Task[T | _ExitOutcome] | None = None
        """The task that does the work. Once the gate is open, it is done, or None if it never
        began.
        """

    def begin(self, loop_run: _LoopRun) -> None:
        """Start the work. Called on the loop."""
        if loop_run.stopping:
            self.gate.open()
            return
        self._task = asyncio.get_running_loop().create_task(_run_work(self._work))
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[T | _ExitOutcome]) -> None:
        if not task.cancelled():
            task.exception()  # mark it as retrieved, because an interrupted caller never reads it
        self.gate.open()

    def cancel(self) -> None:
        """Cancel the work. Called on the loop."""
        if self._task is not None:
            self._task.cancel()

    def result(self) -> T:
        """Return the work's result. Raises CancelledError if it did not finish."""
        if self._task is None or not self._task.done():
            raise asyncio.CancelledError
        outcome = self._task.result()
        if isinstance(outcome, _ExitOutcome):
            raise outcome.error
        return outcome


class _LoopRun:
    """One run of the thread and its loop, from start to end."""

    def __init__(self, run: Callable[[_LoopRun], None], name: str) -> None:
        self.thread = threading.Thread(target=run, args=(self,), name=name, daemon=True)
        self.ident = 0
        """The id of the thread; 0 until the thread runs."""
        self.started_gate = _Gate()
        """Opens when the loop is running or has failed to start."""
        self.error: Exception | None = None
        """The reason why the loop did not start."""
        self.stopping = False
        """True once no more work is accepted, because the thread is ending or has ended."""
        self.ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._gates: set[_Gate] = set()
        """The gates of waiting callers."""
        self._claim_lock = threading.Lock()
        """Acquired once, without waiting: by the thread when it starts serving, or before that by
        an interrupted starter.
        """
        self._is_joined = False
        self._process_id = process_id()

    # ── on the thread ─────────────────────────────────────────────────────────────────────────────
    def claim(self) -> bool:
        """Return True only to the first caller: either the thread, which then serves, or its
        interrupted starter, in which case the thread does not serve.
        """
        return self._claim_lock.acquire(blocking=False)

    async def serve_until_stopped(self) -> None:
        """Accept posted work until `stop`."""
        self._loop = asyncio.get_running_loop()
        self.started_gate.open()
        if not self.stopping:  # a later `stop` finds the loop
            await self._stop.wait()

    def mark_ended(self) -> None:
        """Record that the loop has ended, and wake all waiting callers."""
        self.stopping = self.ended = True
        for gate in list(self._gates):
            gate.open()
        self.started_gate.open()

    # ── on any thread ─────────────────────────────────────────────────────────────────────────────
    def post(self, call: Callable[..., object], *args: object) -> None:
        """Schedule `call(*args)` on the loop. This does nothing if the loop has ended."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call, *args)

    def wait(self, gate: _Gate, timeout_s: float | None = None) -> bool:
        """Wait until the gate is open or the thread has ended. Return False on a timeout."""
        self._gates.add(gate)
        try:
            return self.ended or gate.wait(timeout_s)  # a later `mark_ended` opens the gate
        finally:
            self._gates.discard(gate)

    def stop(self) -> None:
        """Ask the thread to end."""
        self.stopping = True
        self.post(self._stop.set)

    def wait_until_ended(self) -> None:
        """Wait until the thread has ended. Returns at once in a forked child."""
        if process_id() != self._process_id:
            return
        self.wait(_Gate())
        if not self._is_joined:  # a signal handler must not wait for a `join` that it interrupts
            self._is_joined = True
            self.thread.join()


class LoopThread:
    """
    A daemon thread with an event loop. Callers in other threads run work on it and wait for the
    result.

    Args:
        client_kind: the kind of client, for error messages.
        close_client: closes the client if it is open; this is the last work on the loop.
    """

    def __init__(
        self,
        client_kind: str,
        *,
        close_client: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._client_kind = client_kind
        self._close_client = close_client
        self._loop_binding = LoopBinding(client_kind)
        self._latest_run: _LoopRun | None = None
        """The latest run."""
        self._start_lock = threading.Lock()
        """Held by the thread that is starting the loop; no thread waits for it."""

    @property
    def state(self) -> str:
        """The state: "open", "closed" or "forked"."""
        if self.forked:
            return "forked"
        return (
            "open" if self._latest_run is not None and not self._latest_run.stopping else "closed"
        )

    @property
    def forked(self) -> bool:
        """True in a child of the process in which the thread runs."""
        return self._loop_binding.state == "forked"

    def start(self) -> None:
        """
        Start the thread, and wait until its loop is running.

        Raises:
            UsageError: the thread is already running, or was started before a fork; or gevent has
                patched threads, so that they are greenlets of one thread, which already runs an
                event loop; or no thread could be started, and `start` may be called again.
            OSError: no event loop could be created, for example because no file descriptor is free;
                `start` may be called again.
        """
        self._loop_binding.check_not_forked()
        if not self._start_lock.acquire(blocking=False):
            raise UsageError(
                Reason.ALREADY_OPEN, f"the {self._client_kind} is being opened already"
            )
        try:
            if self._latest_run is not None:
                if not self._latest_run.stopping:
                    raise UsageError(
                        Reason.ALREADY_OPEN, f"the {self._client_kind} is open already"
                    )
                self.check_caller()
                self._latest_run.wait_until_ended()
            self._latest_run = self._start_run()
        finally:
            self._start_lock.release()

    def _start_run(self) -> _LoopRun:
        loop_run = _LoopRun(self._run_thread, f"keylane {self._client_kind}")
        try:
            self._start_thread(loop_run.thread)
            loop_run.started_gate.wait()
        except UsageError:
            raise
        except BaseException:  # an interrupt such as Ctrl-C: end a thread that has already started
            if not loop_run.claim():
                self._latest_run = loop_run  # the next `start` waits for its end
                loop_run.stop()
            raise
        if loop_run.error is not None:
            raise loop_run.error
        return loop_run

    def _start_thread(self, thread: threading.Thread) -> None:
        """Start the thread. Raises UsageError if the system, or an interpreter that is shutting
        down, refuses to.
        """
        try:
            loop_logs.LOGS.start()
            thread.start()
        except RuntimeError as error:
            refusal = UsageError(
                Reason.OTHER_LOOP,
                f"the {self._client_kind} needs a thread for its event loop: {error}",
            )
            refusal.hint = NO_THREAD_HINT
            raise refusal from error

    def _run_thread(self, loop_run: _LoopRun) -> None:
        was_served = False
        loop_run.ident = get_ident()
        try:
            _check_real_thread(self._client_kind)
            loop_logs.LOGS.register()
            with asyncio.Runner() as runner:
                self._run_until_served(runner.get_loop(), loop_run)
                was_served = True
        except Exception as error:
            if was_served and not threading.main_thread().is_alive():
                # The loop is closed; since Python 3.12, shutting down its thread pool starts a
                # thread, which fails here.
                return
            if loop_run.started_gate.is_open:
                raise
            loop_run.error = (
                error  # no loop could be created, for example without a file descriptor
            )
        finally:
            loop_logs.LOGS.unregister()
            loop_run.mark_ended()

    def _run_until_served(self, loop: asyncio.AbstractEventLoop, loop_run: _LoopRun) -> None:
        """Run `_serve` until it returns. If an error stops the loop, continue, so that the client
        is closed.
        """
        serve_task = loop.create_task(self._serve(loop_run))
        while not serve_task.done():
            try:
                loop.run_until_complete(serve_task)
            except (SystemExit, KeyboardInterrupt):
                log = logging.getLogger(f"keylane.{self._client_kind}")
                log.exception(
                    "closing the %s, because a callback ended its event loop", self._client_kind
                )
                loop_run.stop()

    async def _serve(self, loop_run: _LoopRun) -> None:
        if not loop_run.claim():
            return  # the starter was interrupted
        self._loop_binding.enter(self, lambda: None)
        await loop_run.serve_until_stopped()
        if self._close_client is not None:
            try:
                await self._close_client()
            except Exception:
                log = logging.getLogger(f"keylane.{self._client_kind}")
                log.exception("the %s could not be closed when it was stopped", self._client_kind)
        self._loop_binding.leave()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None = None) -> T:
        """
        Run `work()` on the loop and return its result; KeyboardInterrupt and a timeout cancel it.

        Raises:
            InvalidRequestError: `timeout_s` is not a number of seconds; nothing was run.
            ClosedError: the thread is not running, or was stopped during the work.
            UsageError: this was called on the thread itself, which would wait forever, or in a
                forked child.
            TimeoutError: the work took longer than `timeout_s` seconds.
            BaseException: the work raised it.
        """
        _check_seconds(timeout_s)
        self._loop_binding.check_not_forked()
        self.check_caller()
        loop_run = self._latest_run
        if loop_run is None or loop_run.stopping:
            raise _add_hint(ClosedError(f"the {self._client_kind} is not open"))
        call = _LoopCall(work)
        try:
            loop_run.post(call.begin, loop_run)
            if not loop_run.wait(call.gate, timeout_s):
                raise TimeoutError(
                    f"the {self._client_kind} has not finished within {timeout_s:g} s"
                )
            return call.result()
        except asyncio.CancelledError:
            raise _add_hint(ClosedError(f"the {self._client_kind} was closed meanwhile")) from None
        except ClosedError as error:
            _add_hint(error)
            raise
        except BaseException:
            loop_run.post(call.cancel)
            raise

    def check_caller(self) -> None:
        """Raise UsageError if called on the thread itself, for example in a codec or a filter,
        because the thread would wait for itself.
        """
        if (
            self._latest_run is not None
            and self._latest_run.ident == get_ident()
            and not self._latest_run.ended
        ):
            error = UsageError(
                Reason.OTHER_LOOP, f"the {self._client_kind} is called on its own event loop"
            )
            error.hint = OWN_LOOP_HINT
            raise error

    def post(self, call: Callable[[], None]) -> None:
        """Schedule `call` on the loop, after earlier work from `run`. This does nothing once the
        thread is stopping.
        """
        if self._latest_run is not None and not self._latest_run.stopping and not self.forked:
            self._latest_run.post(call)

    def stop(self) -> None:
        """
        Close the client, cancel the remaining work, and wait until the thread has ended.

        This does nothing in a forked child. An interrupt ends only the wait.

        Raises:
            UsageError: this was called on the thread itself; nothing was stopped.
        """
        loop_run = self._latest_run
        if loop_run is None or self.forked:
            return
        self.check_caller()
        loop_run.stop()
        loop_run.wait_until_ended()
        loop_logs.LOGS.wait_until_handled()

    def open_client(
        self, enter: Callable[[], Coroutine[Any, Any, object]], exit_hook: ExitHook
    ) -> None:
        """Start the thread, run `enter` on it, and enable `exit_hook`. Raises the errors of
        both.
        """
        self.start()
        try:
            self.run(enter)
        except BaseException:
            self.stop()
            raise
        exit_hook.enable()

    def close_client(
        self, close: Callable[[], Coroutine[Any, Any, object]], exit_hook: ExitHook
    ) -> None:
        """
        Run `close` on the thread if the client is open, stop the thread, and disable `exit_hook`.

        Raises:
            UsageError: this was called on the thread itself; the client stays open.
            BaseException: `close` raised it.
        """
        if self.state != "open":
            self.stop()  # it may be closing, or its event loop may have ended
            exit_hook.disable()
            return
        self.check_caller()
        try:
            with suppress(ClosedError):  # another thread has closed it
                self.run(close)
        finally:
            self.stop()
            exit_hook.disable()


class _ExitOutcome:
    """The outcome of work that raised SystemExit or KeyboardInterrupt."""

    def __init__(self, error: SystemExit | KeyboardInterrupt) -> None:
        self.error = error


async def _run_work(work: Callable[[], Coroutine[Any, Any, T]]) -> T | _ExitOutcome:
    """
    Return the result of the work.

    SystemExit and KeyboardInterrupt, for example from `sys.exit()` in a codec, are returned for the
    caller to raise, because raising them here would stop the loop.
    """
    try:
        return await work()
    except (SystemExit, KeyboardInterrupt) as error:
        return _ExitOutcome(error)


def _check_real_thread(client_kind: str) -> None:
    """Raise UsageError if an event loop is already running in this new thread, which means that the
    thread is a greenlet.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    error = UsageError(
        Reason.OTHER_LOOP,
        f"the {client_kind} needs a thread for its event loop; threads of this program are "
        "greenlets of one thread, in which another event loop runs",
    )
    error.hint = SHARED_THREAD_HINT
    raise error


def _add_hint(error: ClosedError) -> ClosedError:
    if error.hint == ClosedError.hint:
        error.hint = HINT
    return error


def _check_seconds(timeout_s: object) -> None:
    """Raise InvalidRequestError unless the timeout is None or a number of seconds that a thread can
    wait.
    """
    if timeout_s is None:
        return
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 <= timeout_s <= threading.TIMEOUT_MAX:  # type: ignore[operator]
        raise InvalidRequestError(
            f"timeout_s must be seconds >= 0, or None for no timeout, not {timeout_s!r:.40}"
        )


class ExitHook:
    """
    Calls a function once when this process ends, if the hook is enabled.

    A forked child of `multiprocessing` calls no `atexit` functions before Python 3.13, but it does
    call the finalizers of `multiprocessing`, unless `os._exit` or a signal ends it.

    Args:
        call: the function to call; it must do nothing in a forked child.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._finalizer: Any = None
        """The finalizer; set only in a child of `multiprocessing`."""

    def enable(self) -> None:
        """Enable the hook."""
        atexit.register(self._run_once)
        # Only a child of `multiprocessing` needs its finalizers, and it has already imported it.
        process = sys.modules.get("multiprocessing.process")
        if process is not None and process.parent_process() is not None:
            from multiprocessing.util import Finalize

            self._finalizer = Finalize(None, self._run_once, exitpriority=0)

    def disable(self) -> None:
        """Disable the hook."""
        atexit.unregister(self._run_once)
        if self._finalizer is not None:
            self._finalizer.cancel()
            self._finalizer = None

    def _run_once(self) -> None:
        self.disable()  # a spawned child also runs atexit functions
        self._call()
