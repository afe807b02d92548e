"""Host names are resolved in a thread pool, and without one at the end of a program."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from keylane.rpc.threads.host_names import HostNames, resolve_blocking

AT_EXIT = """
import asyncio, atexit
from keylane.rpc.threads.host_names import HostNames

async def resolve_blocking() -> None:
    print([place["host"] for place in await HostNames().resolve("localhost", 7000)])

atexit.register(lambda: asyncio.run(resolve_blocking()))
"""


def test_name_is_looked_up_when_the_program_ends():
    """A client that was never closed is closed at the end of the program, and then sends its
    remaining messages.
    """
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("['127.0.0.1']\n", "")


def test_lookup_without_threads_finds_what_a_pool_finds():
    async def of_the_pool(family: socket.AddressFamily) -> object:
        return await HostNames().resolve("localhost", 7000, family)

    for family in (socket.AF_INET, socket.AF_UNSPEC):
        assert resolve_blocking("localhost", 7000, family) == asyncio.run(of_the_pool(family))


def test_lookup_without_threads_refuses_an_unknown_name():
    with pytest.raises(OSError, match=r"Errno"):
        resolve_blocking("nowhere.invalid", 7000, socket.AF_INET)
