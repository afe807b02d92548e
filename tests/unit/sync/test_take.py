"""What an interrupted caller never saw is put back, whenever the interrupt comes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from keylane.sync.loop_thread import LoopThread
from keylane.sync.take import Take


def test_result_is_put_back_when_the_caller_is_interrupted_before_it_has_it():
    """The interrupt comes while the caller makes something of what was taken."""
    thread = LoopThread("client")
    thread.start()
    back: list[str] = []

    async def take() -> str:
        return "taken"

    def interrupted(_taken: str) -> None:
        raise KeyboardInterrupt

    assert Take(take, back.append).run(thread, str.upper) == "TAKEN"
    with pytest.raises(KeyboardInterrupt):
        Take(take, back.append).run(thread, interrupted)
    thread.stop()
    assert back == ["taken"]


def test_result_is_put_back_when_the_work_goes_on_after_the_interrupt(monkeypatch):
    """It is not cancelled where the interrupt came before the caller waited."""
    thread = LoopThread("client")
    thread.start()
    back: list[str] = []
    put_back = threading.Event()
    go_on = asyncio.Event()

    async def take() -> str:
        await go_on.wait()
        return "taken"

    def note(taken: str) -> None:
        back.append(taken)
        put_back.set()

    begin = asyncio.run_coroutine_threadsafe

    def interrupted(*args: Any) -> Any:
        begin(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Take(take, note).run(thread, str.upper)
    assert not back
    thread.post(go_on.set)
    assert put_back.wait(5)
    thread.stop()
    assert back == ["taken"]
