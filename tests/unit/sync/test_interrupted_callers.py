"""A signal handler, a handler of the log and an event loop of keylane.sync never wait for each
other.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keylane.sync import loop_logs
from keylane.sync.loop_thread import LoopThread

PROGRAM = Path(__file__).with_name("interrupted_caller.py")


@pytest.mark.parametrize(("way", "said"), [("trace", "moments"), ("signal", "calls 200")])
def test_call_in_a_signal_handler_returns_when_it_interrupts_another(way: str, said: str):
    """The interrupted call held a lock that the event loop waited for, or was waited for itself."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), way],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


class Sender(logging.Handler):
    """Sends what is logged through a client."""

    def __init__(self, texts: list[str], send: Callable[[], object]) -> None:
        super().__init__()
        self._send = send
        self.texts = texts
        self.threads: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Send it."""
        self._send()
        self.texts.append(record.getMessage())
        self.threads.add(record.threadName or "")


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("client")
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture
def sender(thread: LoopThread) -> Iterator[Sender]:
    async def send() -> None:
        # So does a codec, and a producer whose brokers are away.
        logging.getLogger("program.codec").info("of the event loop")

    texts: list[str] = []
    sender = Sender(texts, lambda: thread.run(send, 60) if len(texts) < 3 else None)
    log = logging.getLogger("program")
    log.addHandler(sender)
    log.setLevel(logging.INFO)
    yield sender
    log.removeHandler(sender)
    log.setLevel(logging.NOTSET)


def test_line_of_an_event_loop_is_handled_when_the_handler_waits_for_that_loop(
    thread: LoopThread, sender: Sender, monkeypatch: pytest.MonkeyPatch
):
    """The loop waited for the handler's lock, and its holder for the loop."""
    monkeypatch.setattr(loop_logs, "SETTLE_S", 60.0)
    logging.getLogger("program").warning("of the program")
    for _ in range(3):
        loop_logs.LOGS.wait_until_handled()
    assert sender.texts == ["of the program"] + ["of the event loop"] * 3
    assert sender.threads == {threading.current_thread().name, "keylane client"}


def test_lines_of_an_event_loop_are_dropped_and_counted_when_handlers_take_too_long(
    thread: LoopThread, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loop_logs, "RECORDS_MAX", 3)

    async def log() -> None:
        for number in range(5):
            logging.getLogger("program").error("line %d", number)

    caplog.handler.acquire()
    try:
        thread.run(log, 60)
        thread.stop()  # it waits for no handler whose lock its caller has
    finally:
        caplog.handler.release()
    monkeypatch.setattr(loop_logs, "SETTLE_S", 60.0)
    loop_logs.LOGS.wait_until_handled()
    assert [record.getMessage() for record in caplog.records] == [
        "line 0",
        "2 log records were dropped, because the log handlers are too slow",
        "line 1",
        "line 2",
    ]


def test_line_is_handled_in_a_forked_child(thread: LoopThread, tmp_path: Path):
    """The thread that handles lines is the parent's."""
    handled = tmp_path / "handled"
    handler = logging.FileHandler(handled)
    log = logging.getLogger("program")
    log.addHandler(handler)
    pid = os.fork()
    if pid == 0:
        child = LoopThread("client")
        child.start()

        async def work() -> None:
            log.error("of the child")

        child.run(work)
        child.stop()
        os._exit(0)
    os.waitpid(pid, 0)
    log.removeHandler(handler)
    handler.close()
    assert handled.read_text() == "of the child\n"


def test_last_line_of_a_client_is_dropped_when_its_handler_sends_it_through_that_client(
    monkeypatch: pytest.MonkeyPatch,
):
    """The warning of `close` about messages that were given up ended as a traceback."""
    log = logging.getLogger("program.closing")
    raised: list[object] = []
    tried = threading.Event()
    monkeypatch.setattr(sys, "excepthook", lambda *error: raised.append(error))

    async def send() -> None: ...

    async def end() -> None:
        log.warning("1 message was given up")

    client = LoopThread("client", close_client=end)

    def send_through() -> None:
        try:
            client.run(send, 5)
        finally:
            tried.set()

    sender = Sender([], send_through)
    log.addHandler(sender)
    try:
        client.start()
        client.stop()
        assert tried.wait(60)
        loop_logs.LOGS.wait_until_handled()
    finally:
        log.removeHandler(sender)
    assert (sender.texts, raised) == ([], [])
