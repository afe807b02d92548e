"""Ports of loopback for programs that start again on the port they had.

The kernel answers a request for port 0 from `ip_local_port_range`, 32768 and up. A port below that
range stays free while its program is down. Each process of tests has ports of its own, also beside
another run on this machine: between the look at a port and the start of its program, no other test
takes it.
"""

from __future__ import annotations

import socket
from itertools import cycle

FIRST = 12_000
PER_PROCESS = 250
PROCESSES_MAX = 80


def own_range() -> tuple[int, int]:
    """The first port of a range that no other process of tests has, and a file that holds the range
    until this process ends.
    """
    for number in range(PROCESSES_MAX):
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0keylane-ports-of-tests-{number}")
        except OSError:
            holder.close()
            continue
        return FIRST + number * PER_PROCESS, holder.detach()
    raise AssertionError(f"{PROCESSES_MAX} processes of tests have ports")


_START, _HOLDER = own_range()
_NUMBERS = cycle(range(_START, _START + PER_PROCESS))


def free_port() -> int:
    """A port on which nothing listens, and that no other process of tests is given."""
    for port, _ in zip(_NUMBERS, range(PER_PROCESS), strict=False):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"no port is free from {_START} on")
