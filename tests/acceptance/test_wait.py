"""`keylane wait` and `--wait-s`: commands that begin before the servers have started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.ports import free_port
from support.running.shared_end import ending_with_parent

pytestmark = pytest.mark.acceptance

TIMEOUT_S = 120


def keylane(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """`keylane ARGUMENTS`, started, with further variables of the environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "keylane.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ending_with_parent(),  # noqa: PLW1509  it calls nothing but the kernel
        env={**os.environ, **variables},
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Status, standard output and standard error of a command."""
    out, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, errors


def test_commands_wait_when_they_begin_before_the_cluster(tmp_path: Path):
    """In a script or a compose file they may be started in any order."""
    port = free_port()
    variables = {"KEYLANE_META": f"127.0.0.1:{port}"}
    wait = ("wait", "--brokers", "2", "--timeout", "100")
    for_people = keylane(*wait, **variables)
    for_programs = keylane(*wait, "--output", "json", **variables)
    listing = keylane("--wait-s", "100", "subject", "list", "--output", "json", **variables)
    reading = keylane("queue", "read", "none", "0", KEYLANE_WAIT_S="100", **variables)
    cluster = keylane(
        "dev", "--data", str(tmp_path / "data"), "--port", str(port), "--output", "json"
    )
    try:
        status, out, errors = ended(for_people)
        assert (status, errors) == (0, "")
        assert "2 broker groups are available: broker-1, broker-2" in out
        status, out, errors = ended(for_programs)
        assert (status, errors) == (0, "")
        facts = json.loads(out)
        assert (facts["ready"], facts["brokers"]) == (True, ["broker-1", "broker-2"])
        assert facts["waited_s"] >= 0
        assert ended(listing) == (0, "[]\n", "")
        status, _, errors = ended(reading)
        assert (status, "SubjectUnknownError" in errors) == (1, True)

        status, out, errors = ended(
            keylane("wait", "--brokers", "3", "--timeout", "1", "-o", "json", **variables)
        )
        problem = json.loads(errors)
        assert (status, out, problem["name"]) == (1, "", "UnavailableError")
        assert problem["code"] == 1151
        assert "after 1 s: 2 of 3 broker groups are available" in problem["message"]
    finally:
        cluster.terminate()
        ended(cluster)
        for process in (for_people, for_programs, listing, reading):
            if process.poll() is None:
                process.kill()
                process.wait()


def test_wait_says_what_is_missing_when_its_time_is_over():
    """No metaserver at all: status 1, and the error of the last try."""
    status, out, errors = ended(keylane("wait", "--meta", "127.0.0.1:1", "--timeout", "0.5"))
    assert (status, out) == (1, "")
    assert "after 0.5 s: cannot reach 127.0.0.1:1" in errors
    with socket.create_server(("127.0.0.1", 0)) as mute:
        meta = f"127.0.0.1:{mute.getsockname()[1]}"
        status, _, errors = ended(keylane("wait", "--meta", meta, "--timeout", "0.5"))
    assert status == 1
    assert "after 0.5 s: no metaserver answered" in errors


@pytest.mark.parametrize(
    "arguments",
    [
        ("wait", "--brokers", "-1"),
        ("wait", "--timeout", "0"),
        ("wait", "--timeout", "nan"),
        ("--wait-s", "-1", "subject", "list"),
        ("--wait-s", "soon", "subject", "list"),
    ],
)
def test_wait_is_refused_when_it_is_no_time(arguments):
    """The usage, and status 2."""
    status, out, errors = ended(keylane(*arguments))
    assert (status, out) == (2, "")
    assert "Invalid value" in errors


def test_wait_ends_at_once_when_the_address_is_wrong():
    """Waiting does not help."""
    status, _, errors = ended(keylane("wait", "--meta", "nowhere"))
    assert status == 1
    assert "ConfigError" in errors
