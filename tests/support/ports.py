"""Ports of loopback for programs that start again on the port they had.

The kernel answers a request for port 0 from `ip_local_port_range`, 32768 and up.  A port below that range
stays free while its program is down, and each worker of a test run has a range of its own.
"""

from __future__ import annotations

import os
import socket
from itertools import cycle

FIRST = 12_000
PER_WORKER = 1_000
WORKERS_MAX = 20


def _worker() -> int:
    """The number of this worker of a run in parallel; 0 without workers."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS_MAX


_START = FIRST + _worker() * PER_WORKER
_OFFSET = os.getpid() % PER_WORKER  # two runs on one machine begin at different ports
_NUMBERS = cycle(_START + (number + _OFFSET) % PER_WORKER for number in range(PER_WORKER))


def free_port() -> int:
    """A port on which nothing listens, and that no other worker is given."""
    for port, _ in zip(_NUMBERS, range(PER_WORKER), strict=False):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"no port is free from {_START} on")
