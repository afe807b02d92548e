"""Names the machine that a server runs on."""

from __future__ import annotations

import contextlib
import hashlib
import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Changes with each boot, at once for all processes of a machine. Unlike the id in /etc/machine-id,
containers have that of their host, and a machine that was cloned has its own.
"""
NAME_BYTES = 6


def machine_name() -> str:
    """Return the same name in all processes on this machine."""
    boot = socket.gethostname()
    with contextlib.suppress(OSError):
        boot = BOOT_ID.read_text()
    return hashlib.blake2b(boot.encode(), digest_size=NAME_BYTES, person=b"keylane").hexdigest()
