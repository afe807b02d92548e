"""Processor time and memory of processes, from /proc; free ports, and conditions that are waited
for.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
HOST = "127.0.0.1"


def cpu_seconds(pids: list[int]) -> float:
    """Return the user and system time of processes, including their terminated children."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended; its parent has its time
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / TICK


def peak_mb(pids: list[int]) -> float:
    """Return the sum of the processes' peak resident memory since `forget_peak`."""
    size_kb = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                size_kb += int(line.split()[1])
    return round(size_kb / 1024, 1)


def forget_peak(pids: list[int]) -> None:
    """Reset the peak resident memory of these processes."""
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it ended meanwhile
            children.setdefault(int(stat.rsplit(")", 1)[1].split()[1]), []).append(int(entry.name))
    members, waiting = [], [pid]
    while waiting:
        member = waiting.pop()
        members.append(member)
        waiting += children.get(member, [])
    return members


def busy_and_stolen_seconds() -> tuple[float, float]:
    """Processor time of everything on this machine since it started, and what its host took from
    it.
    """
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4] - fields[7]) / TICK, fields[7] / TICK


def free_port() -> int:
    """Return a free port on loopback."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def is_listening(port: int) -> bool:
    """Return True if the address accepts connections."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


def wait_until(condition: Callable[[], bool], description: str, seconds: float = 60) -> None:
    """Wait until a condition is true."""
    ends_at = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends_at:
            raise TimeoutError(f"{description} was not ready within {seconds:.0f} s")
        time.sleep(0.1)
