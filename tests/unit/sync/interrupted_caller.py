"""A program whose calls of a client are interrupted by a handler that calls it too, as a handler of
SIGTERM does.

python interrupted_caller.py trace     at each line that its thread runs, once
python interrupted_caller.py signal    at 200 random moments
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import random
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from keylane.protocol.errors import ClosedError, UsageError
from keylane.sync import loop_logs
from keylane.sync.loop_thread import LoopThread

log = logging.getLogger("program")


class SendingOnSignal(logging.Handler):
    """Sends what is logged, as `keylane.sync.Producer` would; what the event loop logs too."""

    def emit(self, _record: logging.LogRecord) -> None:
        with suppress(ClosedError):
            client.run(send)


async def send() -> int:
    log.info("%s", "the codec logs") if not random.randrange(4) else None
    return 7


async def end() -> None:
    log.warning("closing")
    await asyncio.sleep(0)


client = LoopThread("client", close_client=end)
calls: list[None] = []


def call_again() -> None:
    calls.append(None)
    with suppress(ClosedError):
        if len(calls) % 3:
            client.run(send)
    if len(calls) % 2:
        client.stop()


def use() -> None:
    with suppress(UsageError):
        client.start()
    with suppress(ClosedError):
        assert client.run(send) == 7
        client.post(lambda: None)
        log.error("a line")
        client.run(send, 5)
    client.stop()


def traced(moment: int) -> bool:
    """Use the client with a call at a moment; False if it ended before."""
    left = moment

    def trace(frame: FrameType, _event: str, _argument: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = opcodes
        left -= 1
        if left == 0:
            call_again()
        return trace

    sys.settrace(trace)
    try:
        use()
    finally:
        sys.settrace(None)
    return left <= 0


def main() -> None:
    moment = 1
    while traced(moment):
        moment += 1
    print("moments", moment)


def signals() -> None:
    signal.signal(signal.SIGALRM, lambda *_: call_again())
    for turn in range(200):
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.000_01, 0.004))
        while len(calls) <= turn:
            use()
    print("calls", len(calls))


loop_logs.SETTLE_S = 0.001  # a caller that is interrupted in a handler holds its lock
faulthandler.dump_traceback_later(120, exit=True)
logging.getLogger().addHandler(SendingOnSignal())
logging.getLogger().setLevel(logging.INFO)
opcodes = "opcodes" in sys.argv
began = time.monotonic()
if sys.argv[1] == "trace":
    main()
else:
    signals()
print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)
