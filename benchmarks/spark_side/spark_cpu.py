"""Processor time of a job on this machine: of Spark's JVM, of Python's workers, and of the brokers
that it reads.

Other programs on the machine change it less than they change how long a job takes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KINDS = ("jvm", "python", "broker")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """A line of /proc: whose child it is, what it runs, and its seconds, with those of children
    that have ended.
    """

    parent: int
    name: str
    seconds: float


def processes() -> dict[int, Process]:
    """Return all visible processes by process id."""
    listed = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has ended
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        seconds = sum(map(int, fields[11:15])) / _TICKS
        listed[int(stat.parent.name)] = Process(int(fields[1]), name, seconds)
    return listed


class Spent:
    """Measures the processor time of this process's descendants and of some servers."""

    def __init__(self, servers: tuple[int, ...]) -> None:
        self._servers = servers

    def now(self) -> dict[str, float]:
        """Return the processor time in seconds, by kind of process."""
        seen = processes()
        children = defaultdict(list)
        for pid, process in seen.items():
            children[process.parent].append(pid)
        spent = dict.fromkeys(KINDS, 0.0)
        left = list(children[os.getpid()])
        while left:
            pid = left.pop()
            if pid in self._servers:
                spent["broker"] += seen[pid].seconds
                continue
            left += children[pid]
            spent["jvm" if seen[pid].name == "java" else "python"] += seen[pid].seconds
        return spent

    def by(self, work: Callable[[], object]) -> dict[str, float]:
        """Return the processor time of a call in seconds, by kind of process."""
        before = self.now()
        work()
        after = self.now()
        return {kind: after[kind] - before[kind] for kind in KINDS}
