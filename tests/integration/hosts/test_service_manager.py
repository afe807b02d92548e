"""Servers under a service manager, played by a socket: what systemd would be told of their lives."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server_process import ServerProcess

SPAN_S = 0.6
WATCHDOG = {"WATCHDOG_USEC": str(int(SPAN_S * 1e6))}
HANGING = """
import signal, sys, time
from keylane.{program}.__main__ import main
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3))
sys.exit(main())
"""
"""A server whose event loop hangs for 3 s at SIGUSR1, while its other threads go on."""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        yield manager


def start(program: str, tmp_path: Path, *arguments: str, module: str = "") -> ServerProcess:
    return ServerProcess(
        module or f"keylane.{program}",
        ("--data", str(tmp_path / program), "--port", "0", *arguments),
        NOTIFY_SOCKET=str(tmp_path / "notify"),
        **WATCHDOG,
    )


def arguments_of(program: str) -> tuple[str, ...]:
    return ("--group", "g1", "--meta", "127.0.0.1:1") if program == "broker" else ()


def wait_for(manager: socket.socket, text: str) -> str:
    manager.settimeout(60)
    while True:
        message = manager.recv(4096).decode()
        if message.startswith(text):
            return message


@pytest.mark.parametrize("program", ["metaserver", "broker"])
def test_server_tells_that_it_is_ready_lives_and_stops(manager, tmp_path, program) -> None:
    process = start(program, tmp_path, *arguments_of(program))
    assert "STATUS=serves at 127.0.0.1:" in wait_for(manager, "READY=1")
    for _ in range(5):
        began_s = time.monotonic()
        wait_for(manager, "WATCHDOG=1")
        assert time.monotonic() - began_s < 30
    process.terminate()
    wait_for(manager, "STOPPING=1")
    assert process.wait(60) == 0
    process.stdout.close()


def test_follower_tells_that_it_is_ready(manager, tmp_path) -> None:
    """It listens nowhere; a manager that waited for it would end it."""
    process = start("broker", tmp_path, *arguments_of("broker"), "--follow", "true")
    assert "STATUS=follows broker group g1" in wait_for(manager, "READY=1")
    wait_for(manager, "WATCHDOG=1")
    process.terminate()
    wait_for(manager, "STOPPING=1")
    assert process.wait(60) == 0
    process.stdout.close()


@pytest.mark.parametrize("program", ["metaserver", "broker"])
def test_server_that_hangs_tells_its_watchdog_nothing(manager, tmp_path, program) -> None:
    process = start(
        program, tmp_path, *arguments_of(program), module=HANGING.format(program=program)
    )
    wait_for(manager, "READY=1")
    wait_for(manager, "WATCHDOG=1")
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    manager.setblocking(False)
    while True:  # what was told before
        try:
            manager.recv(4096)
        except BlockingIOError:
            break
    manager.settimeout(3 * SPAN_S)
    with pytest.raises(TimeoutError):
        manager.recv(4096)
    wait_for(manager, "WATCHDOG=1")  # it lives again
    process.terminate()
    assert process.wait(60) == 0
    process.stdout.close()
