"""A broker that starts waits for the one that stops, if it may."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
from pathlib import Path

import pytest

from keylane.broker.app import wait_for_predecessor
from keylane.broker.settings import BrokerSettings
from support.ports import free_port


def settings(data: Path, port: int, takeover_ms: int) -> BrokerSettings:
    return BrokerSettings(
        group="g1", data=data, meta=("127.0.0.1:1",), port=port, takeover_ms=takeover_ms
    )


async def test_start_waits_until_folder_and_port_are_free(tmp_path: Path, caplog) -> None:
    port = free_port()
    lock = (tmp_path / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    listener = socket.create_server(("127.0.0.1", port))
    waiting = asyncio.create_task(wait_for_predecessor(settings(tmp_path, port, 60_000)))
    with caplog.at_level(logging.WARNING):
        await asyncio.sleep(0.1)
    assert [record.message for record in caplog.records] == [
        f"ready to take over: stop the broker that uses {tmp_path}"
    ]
    listener.close()
    await asyncio.sleep(0.1)
    assert not waiting.done(), "the folder is still locked"
    lock.close()
    async with asyncio.timeout(10):
        await waiting


@pytest.mark.parametrize("takeover_ms", [0, 50])
async def test_start_waits_no_longer_than_it_may(tmp_path: Path, takeover_ms: int) -> None:
    """Then the start itself says what is in use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with asyncio.timeout(10):
            await wait_for_predecessor(settings(tmp_path, port, takeover_ms))


async def test_start_waits_for_nothing_when_all_is_free(tmp_path: Path) -> None:
    async with asyncio.timeout(1):
        await wait_for_predecessor(settings(tmp_path / "new", 0, 60_000))
