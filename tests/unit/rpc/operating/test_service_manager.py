"""What a server tells its service manager, over a socket as that of systemd."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator

import pytest

from keylane.rpc.operating.service_manager import notify, watchdog_interval_s, watchdog_loop
from keylane.rpc.program import announce_ready, run_program


@pytest.fixture
def manager(tmp_path, monkeypatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield manager


def told(manager: socket.socket) -> list[str]:
    """All messages that have come."""
    manager.settimeout(0.1)
    messages = []
    try:
        while True:
            messages.append(manager.recv(4096).decode())
    except TimeoutError:
        return messages


def test_server_tells_its_manager_that_it_is_ready(manager, capfd) -> None:
    announce_ready("broker", "127.0.0.1:7100")
    assert told(manager) == ["READY=1\nSTATUS=serves at 127.0.0.1:7100"]


def test_message_goes_to_an_abstract_socket_when_its_name_begins_with_at() -> None:
    name = f"keylane-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        notify("READY=1", {"NOTIFY_SOCKET": f"@{name}"})
        assert told(manager) == ["READY=1"]


@pytest.mark.parametrize("path", ["/nowhere/notify", "not\0a path", "x" * 200])
def test_message_that_cannot_be_sent_is_logged_and_ignored(path, caplog) -> None:
    notify("READY=1\nSTATUS=x", {"NOTIFY_SOCKET": path})
    assert "cannot tell the service manager READY=1:" in caplog.text


def test_message_is_dropped_when_the_manager_does_not_read(tmp_path, caplog) -> None:
    """It must not stop the server."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        began_s = time.monotonic()
        for _ in range(2_000):
            notify("WATCHDOG=1", {"NOTIFY_SOCKET": path})
        assert time.monotonic() - began_s < 30
        assert "cannot tell" in caplog.text


def test_server_sends_nothing_without_a_manager(caplog) -> None:
    notify("READY=1", {})
    assert not caplog.records


@pytest.mark.parametrize(
    ("environment", "interval_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 10.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid() + 1)}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_is_told_three_times_in_its_span(environment, interval_s) -> None:
    assert watchdog_interval_s(environment) == interval_s


async def test_watchdog_loop_ends_when_nobody_watches(monkeypatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    await asyncio.wait_for(watchdog_loop(), 5)


def test_program_tells_the_watchdog_only_while_its_event_loop_runs(manager, monkeypatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "60000")
    while_hanging = []

    async def main(_stop: asyncio.Event) -> None:
        await asyncio.sleep(0.5)
        assert told(manager).count("WATCHDOG=1") >= 3
        time.sleep(0.5)  # the hang
        while_hanging.extend(told(manager))

    assert run_program(main) == 0
    assert len(while_hanging) <= 1
