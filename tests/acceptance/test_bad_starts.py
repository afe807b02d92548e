"""What cannot work says so in one sentence: an old Python, a profile that leads nowhere, and a
shell that completes names without a cluster.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from keylane.cli.completion import WAIT_S_MIN
from support.ports import free_port
from support.server_process import run_keylane

pytestmark = pytest.mark.acceptance
ROOT = Path(__file__).resolve().parents[2]
ATTEMPTS = 5
BUSY = 1.25
"""The factor by which the same process may take longer on a busy machine."""


def test_import_is_refused_when_python_is_too_old():
    code = "import sys; sys.version_info = (3, 10, 2, 'final', 0); import keylane"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: keylane needs Python 3.11 or newer, and this is Python 3.10.2"
    )


def test_make_is_refused_when_python_is_too_old(tmp_path):
    """`false` answers as an older Python does: it fails the comparison of versions.

    A make that runs these tests leaves its job server to no other make.
    """
    outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    done = subprocess.run(
        ["make", "setup", "PYTHON=false", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in outer},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        "keylane needs Python 3.11 or newer; choose one: make PYTHON=python3.11"
    )
    assert not (tmp_path / "venv").exists()


def test_command_names_the_address_when_the_profile_leads_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    address = f"127.0.0.1:{free_port()}"
    assert run_keylane("profile", "add", "prod", "--meta", address).returncode == 0
    done = run_keylane("-p", "prod", "subject", "list")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"keylane: cannot reach {address}: connection refused [")


def test_command_names_the_file_when_the_token_of_a_profile_is_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    token = tmp_path / "token"
    token.write_text("kl_" + "a" * 43)
    added = run_keylane("profile", "add", "prod", "--meta", "a:1", "--token-file", str(token))
    assert added.returncode == 0
    token.unlink()
    done = run_keylane("-p", "prod", "subject", "list")
    assert (done.returncode, done.stdout) == (1, "")
    assert str(token) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_nothing_when_there_is_no_cluster(shell):
    """The words of commands are completed all the same."""
    address = f"127.0.0.1:{free_port()}"
    assert _completed(shell, address, "keylane subject describe o").strip() == ""
    assert "describe" in _completed(shell, address, "keylane subject desc")


@pytest.mark.parametrize("connects", [True, False])
def test_completion_takes_half_a_second_when_a_metaserver_is_silent(connects):
    """Or, where the command alone takes longer, as long as that and a short wait."""
    refused = f"127.0.0.1:{free_port()}"
    with (
        socket.create_server(("127.0.0.1", 0), backlog=64 * connects) as silent,
        ExitStack() as waiting,
    ):
        host, port = silent.getsockname()
        for _ in range(0 if connects else 4):  # then the kernel answers no further connection
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex((host, port))
        attempts = [
            [_completion_s(address) for address in (refused, f"{host}:{port}")]
            for _ in range(ATTEMPTS)
        ]
    refused_s, silent_s = map(min, zip(*attempts, strict=True))
    assert silent_s < max(0.5, BUSY * refused_s + WAIT_S_MIN)


def _completion_s(address: str) -> float:
    """The time, in seconds, that a process takes to complete a name that no metaserver gives."""
    started_s = time.monotonic()
    assert _completed("bash", address, "keylane subject describe o").strip() == ""
    return time.monotonic() - started_s


def _completed(shell: str, address: str, words: str) -> str:
    """What the completion of the last word prints, in the form of a shell."""
    environment = os.environ | {
        "KEYLANE_META": address,
        "_KEYLANE_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": words.rpartition(" ")[2] if shell == "fish" else str(words.count(" ")),
    }
    done = subprocess.run(
        [Path(sys.executable).with_name("keylane")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
