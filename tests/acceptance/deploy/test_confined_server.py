"""A server as the compose file starts it: on a read-only root, asked for its health by the command
of the file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hosts.deployed import documents, image_environment
from support.ports import free_port
from support.server_process import run_keylane

pytestmark = pytest.mark.acceptance

(COMPOSE,) = documents("compose.yaml")
TIMEOUT_S = 60
READ_ONLY = """
set -e
mount --make-rprivate /
mount --bind "$1" "$1"
for place in $(awk '{ print $2 }' /proc/mounts | sort -r); do
    case "$place" in "$1"|/proc|/proc/*|/dev|/dev/*|/sys|/sys/*) ;; *) mount -o remount,ro,bind "$place" 2>/dev/null || true ;; esac
done
shift
if touch "$0.written" 2>/dev/null; then exit 3; fi
exec "$@"
"""
"""$1: the folder that stays writable; the rest: the command.  $0: a path outside of it."""


def confined(data: Path, outside: Path, command: list[str]) -> list[str]:
    """The command on a read-only root; where the right to mount is lacking, the command itself,
    told loudly.
    """
    wrapper = ["unshare", "--mount", "--map-root-user"]
    shell = ["sh", "-c", READ_ONLY, str(outside), str(data)]
    tried = subprocess.run([*wrapper, *shell, "true"], capture_output=True, check=False)
    if tried.returncode == 0:
        return [*wrapper, *shell, *command]
    print("NO MOUNT NAMESPACE: the server runs on a root that it can write to", file=sys.stderr)
    return command


class ComposedServers:
    """A metaserver and a broker of one host, over TLS, started with the variables of the image."""

    def __init__(self, folder: Path) -> None:
        self.data, self.made = folder / "data", folder / "made"
        self.data.mkdir()
        self.ports = {"metaserver": free_port(), "broker": free_port()}
        done = run_keylane(
            *("cluster", "init", str(self.made), "--host", "127.0.0.1", "--data", str(self.data)),
            *("--meta-port", str(self.ports["metaserver"])),
            *("--broker-port", str(self.ports["broker"])),
        )
        assert done.returncode == 0, done.stderr
        self.programs = {name: self._start(name, folder) for name in ("metaserver", "broker")}

    def _start(self, program: str, outside: Path) -> subprocess.Popen[str]:
        variables = {
            name: value.replace("/etc/keylane", str(self.made / "127.0.0.1"))
            for name, value in image_environment().items()
            if name != "PATH"
        }
        command = [sys.executable, "-m", "keylane.cli", program, "run"]
        command = confined(self.data, outside / "outside", command)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | variables
        )
        assert process.stdout
        assert json.loads(process.stdout.readline())["ready"]
        return process

    def asked(self, service: str) -> subprocess.CompletedProcess[str]:
        """Run the health check of a service of the file, at the port of the program here."""
        program = COMPOSE["services"][service]["command"][0]
        kind, _python, *words, url, authority = COMPOSE["services"][service]["healthcheck"]["test"]
        assert kind == "CMD"
        url = url.replace(":7000/", f":{self.ports[program]}/").replace(
            ":7100/", f":{self.ports[program]}/"
        )
        authority = authority.replace("/etc/keylane", str(self.made / "127.0.0.1"))
        return subprocess.run(
            [sys.executable, *words, url, authority],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def stop(self) -> None:
        for process in reversed(self.programs.values()):
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
            assert process.stdout
            process.stdout.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[ComposedServers]:
    servers = ComposedServers(tmp_path_factory.mktemp("composed"))
    yield servers
    servers.stop()


@pytest.mark.parametrize("service", ["meta-1", "broker-1"])
def test_server_is_healthy_on_a_read_only_root(servers: ComposedServers, service: str) -> None:
    asked = servers.asked(service)
    assert (asked.returncode, asked.stdout) == (0, ""), asked.stderr
    assert (servers.data / "broker-g1").is_dir()


def test_health_check_fails_when_the_server_is_stopped(servers: ComposedServers) -> None:
    """The control of the health check."""
    servers.programs["metaserver"].send_signal(signal.SIGTERM)
    servers.programs["metaserver"].wait(TIMEOUT_S)
    assert servers.asked("meta-1").returncode == 1
