"""Describes the machine that a figure comes from."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

LOOP_PASSES = 1_000_000


def machine() -> dict[str, object]:
    """Describe the machine for a result's header: cores, memory, processor, kernel, Python."""
    cpu = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(pages / 2**30, 1),
        "cpu": cpu,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "python_loop_ns": round(python_loop_ns(), 1),
    }


def python_loop_ns() -> float:
    """
    Time of an addition in a Python loop, the best of five, in nanoseconds.

    It tells how fast this interpreter is here: a build without profile-guided optimization takes up
    to half as long again, and so does a machine of another generation.
    """
    best_ns = sys.maxsize
    for _ in range(5):
        total, began_ns = 0, time.process_time_ns()
        for number in range(LOOP_PASSES):
            total += number
        best_ns = min(best_ns, time.process_time_ns() - began_ns)
    return best_ns / LOOP_PASSES


def peak_mb(pid: int) -> float:
    """Return the peak resident memory of a running process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise AssertionError(f"no memory figure for process {pid}")
