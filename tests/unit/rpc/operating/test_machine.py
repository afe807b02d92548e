"""The name of the machine that a server runs on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keylane.rpc.operating import machine
from keylane.rpc.operating.machine import machine_name

SHOW = "from keylane.rpc.operating.machine import machine_name; print(machine_name())"


def test_processes_of_a_machine_give_it_the_same_name():
    name = machine_name()
    assert len(name) == 12
    other = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == name


def test_machine_has_the_name_of_its_host_where_the_kernel_gives_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    names = set()
    monkeypatch.setattr(machine, "BOOT_ID", tmp_path / "none")
    for host in ("one", "two", "one"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        names.add(machine_name())
    assert len(names) == 2
