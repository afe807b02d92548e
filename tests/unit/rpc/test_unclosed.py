"""A client that was not closed: one warning names the place where it was created."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from typing import Any

import pytest

from keylane import Admin, Producer
from keylane.rpc.connections import Connections
from keylane.rpc.unclosed import creation_place

ADDRESS = "127.0.0.1:1"


def run(story: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log, the event loop's handler of exceptions and Python's warnings say of a story."""
    said: list[str] = []

    async def watched() -> object:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: said.append(context["message"]))
        return await story()

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        kept = asyncio.run(watched())
        del kept
        gc.collect()
    said += [str(each.message) for each in shown]
    return said + [record.getMessage() for record in caplog.records]


async def forget() -> Connections:
    connections = Connections(None, timeout_ms=1_000, what="producer")
    connections.open()
    return connections


async def forget_in_a_running_loop() -> None:
    connections = await forget()
    del connections
    gc.collect()
    await asyncio.sleep(0.05)


@pytest.mark.parametrize("story", [forget, forget_in_a_running_loop])
def test_client_that_was_not_closed_is_named_once(story: Any, caplog: pytest.LogCaptureFixture):
    said = run(story, caplog)
    assert len(said) == 2  # the same text for the log and as a ResourceWarning
    assert len(set(said)) == 1
    assert f"the producer that was created at {__file__}:" in said[0]
    assert "was never closed: use `async with`" in said[0]


def test_client_that_was_closed_is_not_named(caplog: pytest.LogCaptureFixture):
    async def close() -> None:
        await (await forget()).close()

    assert run(close, caplog) == []


def test_forked_child_leaves_the_connections_to_its_parent(caplog: pytest.LogCaptureFixture):
    """It says nothing either: its parent closes the client."""

    async def story() -> None:
        connections = await forget()
        child = os.fork()
        if not child:
            connections._own_network._unclosed()  # as the end of the child's program does
            os._exit(1 if caplog.records else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        await connections.close()

    assert run(story, caplog) == []


def test_place_is_the_line_of_the_program():
    producer, admin = Producer(ADDRESS), Admin(ADDRESS)
    places = [client._connections._created_at for client in (producer, admin)]
    assert all(place.startswith(f"{__file__}:") for place in places)
    assert creation_place().startswith(f"{__file__}:")
