"""The metaserver as a program: its start, its errors when it cannot start, and its state after a
SIGKILL.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, Heartbeat, Join
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.brokers.hosting_broker import hosting_broker

A = "a" * 16


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "keylane.metaserver", *map(str, arguments)]


@contextmanager
def started(folder: Path, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the address it said it serves at."""
    process = subprocess.Popen(
        command("--data", folder, "--port", 0, *arguments), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["ready"] is True
        assert ready["program"] == "metaserver"
        yield process, ready["address"]
    finally:
        process.kill()
        process.communicate(timeout=60)


def refused(*arguments: object, options: tuple[str, ...] = ()) -> str:
    """Return what the program prints when it refuses to start, with exit status 1."""
    done = subprocess.run(
        [sys.executable, *options, *command(*arguments)[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_metaserver_ends_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """A signal ends the metaserver cleanly, with status 0."""
    with started(tmp_path / "new" / "folder") as (process, address):
        assert address.startswith("127.0.0.1:")
        process.send_signal(number)
        assert process.wait(timeout=60) == 0


@pytest.mark.crash
async def test_killed_metaserver_keeps_sessions_and_tokens(tmp_path: Path) -> None:
    """After SIGKILL the same subjects, sessions and tokens are served again; the next grant is a
    higher token.
    """
    network = HttpNetwork()
    with started(tmp_path) as (process, address):
        meta = MetaClient(network, [address])
        async with hosting_broker(meta, "left"):
            await meta.create_subject(CreateSubject(subject="s", partitions=4))
            await meta.call(endpoints.JOIN, Join(subject="s", group="g", session=A))
            before = await meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))
        process.kill()
        process.wait(timeout=60)
    with started(tmp_path) as (_, address):
        meta = MetaClient(network, [address])
        assert (await meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))).grants == before.grants
        route = await meta.route("s")
        assert len(route.partitions) == 4
    await network.close()


def test_metaserver_refuses_a_port_in_use(tmp_path: Path) -> None:
    """A port that is taken is named, with what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused("--data", tmp_path, "--port", port)
    assert not list(tmp_path.iterdir())
    assert str(port) in said
    assert "Choose another port" in said


def test_metaserver_refuses_an_address_that_is_not_loopback(tmp_path: Path) -> None:
    """Only loopback is served as long as there is no access control."""
    assert "there is no TLS" in refused("--data", tmp_path, "--port", 0, "--host", "0.0.0.0")
    assert not list(tmp_path.iterdir())


def test_metaserver_refuses_an_unusable_folder(tmp_path: Path) -> None:
    """A data folder that cannot be made is refused with advice."""
    file = tmp_path / "file"
    file.write_text("")
    said = refused("--data", file, "--port", 0)
    assert "DataFolderError" in said
    assert "Give a folder" in said


def test_metaserver_lists_all_impossible_settings(tmp_path: Path) -> None:
    """All impossible settings are listed at once; no folder at all is one of them."""
    config = tmp_path / "meta.toml"
    config.write_text('poll_ms = 0\nport = -1\ncolour = "red"\n')
    said = refused("--config", config)
    assert "colour" in said
    assert "data" in said
    config.write_text(f'data = "{tmp_path}"\npoll_ms = 0\nport = -1\n')
    said = refused("--config", config)
    assert "poll_ms" in said
    assert "port" in said


def test_metaserver_refuses_to_run_without_assertions(tmp_path: Path) -> None:
    """The metaserver refuses to run with its assertions switched off."""
    assert "-O" in refused("--data", tmp_path, options=("-O",))
