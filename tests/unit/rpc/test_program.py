"""Running a program: exit statuses, signals, and the line that says it is ready."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import ssl
import subprocess
import sys
from functools import partial

import pytest

from keylane.protocol.errors import AddressError
from keylane.rpc.program import announce_ready, announce_stop, run_program


@pytest.fixture(autouse=True)
def log_as_before():
    """A program logs to its own standard error: later tests do not."""
    package, handlers = logging.getLogger("keylane"), logging.getLogger().handlers[:]
    level = package.level
    yield
    package.setLevel(level)
    logging.getLogger().handlers[:] = handlers


def test_program_that_returns_exits_with_zero(capfd):
    """The end of main is status 0 and no output."""

    async def main(stop: asyncio.Event) -> None:
        assert not stop.is_set()

    assert run_program(main) == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_asks_main_to_stop(number):
    """SIGTERM and SIGINT set the event; main ends in its own time."""
    cleaned = []

    async def main(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 5)
        cleaned.append(True)

    assert run_program(main) == 0
    assert cleaned


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_program_says_that_it_stops_and_has_stopped_when_a_signal_comes(number, capfd):
    """It ended without a word: a program that was stopped looked like one that had crashed."""

    async def main(stop: asyncio.Event) -> None:
        for _ in range(2):
            os.kill(os.getpid(), number)
            await asyncio.wait_for(stop.wait(), 60)
            await asyncio.sleep(0.01)

    assert run_program(main, on_stop=partial(announce_stop, "broker")) == 0
    out, err = capfd.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [
        {"stopping": True, "program": "broker"},
        {"stopped": True, "program": "broker"},
    ]
    said = [line.split(" INFO keylane.rpc ")[1] for line in err.splitlines()]
    assert said == ["stopping", "stopped"]


def test_program_stops_with_zero_when_the_reader_of_its_output_has_gone():
    code = """
import os, signal
from functools import partial
from keylane.rpc.program import run_program, announce_stop
async def main(stop):
    os.kill(os.getpid(), signal.SIGTERM)
    await stop.wait()
raise SystemExit(run_program(main, on_stop=partial(announce_stop, "broker")))
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_error_of_ours_is_a_sentence_and_status_one(capfd):
    """A KeylaneError ends the program with its text and advice on standard error, no traceback."""

    async def main(stop: asyncio.Event) -> None:
        raise AddressError("cannot listen on 127.0.0.1:80")

    assert run_program(main) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err == (
        "keylane: cannot listen on 127.0.0.1:80 [AddressError 1400]\n"
        "  Choose another port with --port, or --port 0 for any free one.\n"
    )


@pytest.mark.parametrize(("hard", "expected"), [(4_096, 4_096), (256, 256)])
def test_program_may_have_many_connections(hard, expected):
    """A server begun with few files allowed takes as many as its user may have."""
    code = f"""
import resource
from keylane.rpc.program import run_program
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
async def main(stop):
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
raise SystemExit(run_program(main))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"({expected}, {hard})\n"


@pytest.mark.parametrize("allowed", [8, 10, 16, 64, 127])
def test_program_is_refused_with_advice_when_it_may_open_too_few_files(allowed):
    """The event loop could not be made, or the first client not be served: a traceback, or a server
    without room for clients.
    """
    code = f"""
import resource
from keylane.rpc.program import run_program
resource.setrlimit(resource.RLIMIT_NOFILE, ({allowed}, {allowed}))
async def main(stop):
    print("begun")
raise SystemExit(run_program(main))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"keylane: this process may have {allowed} open files and connections, and needs at least "
        f"128: its data takes some "
        "dozens, and each client one or two [StorageError 1300]\n"
        "  Raise the limit of open files: `ulimit -n 65536` in the shell that starts it, "
        "`LimitNOFILE=65536` in a systemd unit.\n"
    )


def test_ready_is_one_line_of_json(capfd):
    """The starter of a program learns from one JSON line where it serves."""
    announce_ready("broker", "127.0.0.1:7001")
    out, _ = capfd.readouterr()
    assert json.loads(out) == {"ready": True, "program": "broker", "address": "127.0.0.1:7001"}
    assert out.count("\n") == 1


@pytest.fixture
def _root_logger():
    """The log of before: later tests would write theirs into the stream of this one."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


@pytest.mark.usefixtures("_root_logger")
def test_connection_that_its_other_end_left_is_no_traceback(capfd):
    """As TLS meets it under uvloop, when a client goes away while an answer is written."""

    async def main(_stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        transport, protocol = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)
        transport.abort()
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError) as closed:
            transport.write_eof()
        told = {
            "message": "Fatal error on SSL protocol",
            "transport": transport,
            "protocol": protocol,
        }
        for error in (
            closed.value,
            ConnectionResetError(104, "reset"),
            ssl.SSLError(1, "shut down"),
            OSError(errno.EHOSTUNREACH, "no route"),
        ):
            loop.call_exception_handler({**told, "exception": error})
        loop.call_exception_handler({**told, "exception": ZeroDivisionError("a bug")})
        loop.call_exception_handler({"message": "a task", "exception": closed.value})
        server.close()

    assert run_program(main, log_level="DEBUG") == 0
    lines = capfd.readouterr().err.splitlines()
    assert sum("DEBUG keylane.rpc a connection has ended" in line for line in lines) == 4
    assert sum(" ERROR " in line for line in lines) == 2
