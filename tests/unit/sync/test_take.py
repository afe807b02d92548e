"""What an interrupted caller never saw is put back, whenever the interrupt comes."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from keylane.sync import loop_thread
from keylane.sync.consumer import MessageRequest
from keylane.sync.loop_thread import LoopThread


def test_result_is_put_back_when_the_caller_is_interrupted_before_it_has_it():
    """The interrupt comes while the caller makes something of what was taken."""
    thread = LoopThread("client")
    thread.start()
    back: list[str] = []

    async def take() -> str:
        return "taken"

    def interrupted(_taken: str) -> None:
        raise KeyboardInterrupt

    assert MessageRequest(take, back.append).run(thread, str.upper) == "TAKEN"
    with pytest.raises(KeyboardInterrupt):
        MessageRequest(take, back.append).run(thread, interrupted)
    thread.stop()
    assert back == ["taken"]


def test_result_is_put_back_when_the_work_goes_on_after_the_interrupt(monkeypatch):
    """As a take does that is behind its last wait, where a cancellation comes too late."""
    thread = LoopThread("client")
    thread.start()
    back: list[str] = []
    put_back, begun = threading.Event(), threading.Event()
    go_on = asyncio.Event()

    async def take() -> str:
        begun.set()
        while not go_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go_on.wait()
        return "taken"

    def note(taken: str) -> None:
        back.append(taken)
        put_back.set()

    def interrupted(_gate: object, _timeout_s: float | None = None) -> bool:
        assert begun.wait(60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loop_thread._Gate, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            MessageRequest(take, note).run(thread, str.upper)
    assert not back
    thread.post(go_on.set)
    assert put_back.wait(5)
    thread.stop()
    assert back == ["taken"]
