"""A client is open in one event loop of one process, and is refused by name elsewhere."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
import threading

import pytest

from keylane import Consumer, Producer, QueueReader
from keylane.protocol.errors import ClosedError, InvalidRequestError, Reason
from keylane.rpc.connections import Connections
from keylane.rpc.loop_binding import LoopBinding, make_thread_check, never_in_thread
from support.forked import Child, error_of
from support.raising import raises


def connections() -> Connections:
    return Connections(None, timeout_ms=1_000, what="thing")


async def opened(client: Connections) -> None:
    client.open()


def test_loop_binding_is_entered_once():
    """An open client is not opened again; a closed one is."""

    async def twice() -> None:
        client = connections()
        for _ in range(2):
            with pytest.raises(ClosedError):
                client.loop_binding.check()
            client.open()
            client.loop_binding.check()
            with raises(Reason.ALREADY_OPEN):
                client.open()
            await client.close()
        client.loop_binding.check_not_elsewhere()

    asyncio.run(twice())


def test_another_event_loop_is_refused_by_name():
    """In another loop of the thread, and once the first loop has ended; then it may be opened
    again.
    """
    client = connections()
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()

    async def check() -> None:
        client.loop_binding.check()

    try:
        first.run_until_complete(opened(client))
        first.run_until_complete(check())
        with raises(Reason.OTHER_LOOP, match="in another event loop") as alive:
            second.run_until_complete(check())
        assert "use it in its own loop" in alive.value.hint
        assert "loop_scope" in alive.value.hint
        assert "threadsafe" not in alive.value.hint  # it would wait for a loop that does not run
        with raises(Reason.OTHER_LOOP):
            client.loop_binding.check()
        with raises(Reason.OTHER_LOOP):
            second.run_until_complete(client.close())
        first.run_until_complete(client.network.close())
        first.close()
        with raises(Reason.OTHER_LOOP, match="has ended") as ended:
            second.run_until_complete(check())
        assert "open the client again in the current one" in ended.value.hint
        assert "come back" not in ended.value.hint
        second.run_until_complete(opened(client))
        second.run_until_complete(check())
        second.run_until_complete(client.close())
    finally:
        first.close()
        second.close()


async def test_another_thread_is_refused_by_name():
    """With a loop of its own there, or without."""
    client = connections()
    client.open()
    errors: list[str] = []

    async def check() -> None:
        client.loop_binding.check_thread()

    def elsewhere() -> None:
        errors.append(error_of(client.loop_binding.check_thread))
        errors.append(error_of(lambda: asyncio.run(check())))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    await client.close()
    assert errors == ["OTHER_LOOP", "OTHER_LOOP"]


def test_fork_is_refused_by_name():
    """In the child nothing can be done with what was open, and closing it does nothing; the parent
    uses it on.
    """
    client, other = connections(), connections()
    told: list[str] = []
    loop = asyncio.new_event_loop()

    async def open_one() -> None:
        client.open(on_fork=lambda: told.append("child"))

    def child() -> list[str]:
        asyncio.run(client.close())
        return [
            *told,
            error_of(client.loop_binding.check),
            error_of(client.loop_binding.check_thread),
            error_of(lambda: asyncio.run(opened(client))),
            error_of(lambda: asyncio.run(opened(other))),
        ]

    loop.run_until_complete(open_one())
    assert Child(child).result() == ["child", *["FORKED"] * 3, ""]
    assert not told
    loop.run_until_complete(client.close())
    loop.close()


def test_fork_of_what_was_closed_may_be_opened():
    """A client that was closed before the fork behaves like a new one."""
    client = connections()

    async def once() -> None:
        client.open()
        await client.close()

    asyncio.run(once())
    assert Child(lambda: error_of(lambda: asyncio.run(once()))).result() == ""


@pytest.mark.parametrize(
    "client",
    [
        Producer("127.0.0.1:1"),
        Consumer("127.0.0.1:1", subject="s", group="g"),
        QueueReader("127.0.0.1:1", subject="s"),
    ],
    ids=lambda client: type(client).__name__,
)
@pytest.mark.parametrize("work", [copy.copy, copy.deepcopy, pickle.dumps])
def test_clients_are_not_copied(client, work):
    """A copy would share the state of the original."""
    with pytest.raises(InvalidRequestError, match="neither copied nor pickled"):
        work(client)


FORKING = """
import asyncio, logging, os, time
from keylane.rpc.loop_binding import LoopBinding

async def main():
    loop_binding = LoopBinding("consumer")
    loop_binding.enter(None, lambda: None)
    print(os.getpid(), flush=True)
    child = os.fork()
    if child == 0:
        if os.fork():
            os._exit(0)
        time.sleep(0.3)  # its own parent has ended
        await asyncio.sleep(0)
    os.waitpid(child, 0)
    loop_binding.leave()

logging.basicConfig(format="%(message)s")
asyncio.run(main())
"""


def test_child_that_ends_names_the_process_of_the_opening_when_its_parent_has_ended():
    run = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, check=True, timeout=60
    )
    assert f"the consumer is open in process {run.stdout.strip()} [" in run.stderr


async def test_place_is_held_by_its_own_thread_when_others_ask():
    here = make_thread_check()
    assert here()
    assert not await asyncio.to_thread(here)
    assert not never_in_thread()


def test_client_says_that_keylane_runs_on_asyncio_when_no_event_loop_does():
    """As under trio.run."""
    with raises(Reason.OTHER_LOOP, match="asyncio") as caught:
        LoopBinding("reader").enter(None, lambda: None)
    assert "keylane.sync" in caught.value.hint
