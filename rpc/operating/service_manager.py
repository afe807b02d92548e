"""What a server tells the service manager that started it, by the protocol of sd_notify(3).

    systemd ── NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID ──▶ server
            ◀── READY=1, STATUS=…, STOPPING=1, WATCHDOG=1 ── server

The protocol is a datagram of lines to a socket, so it needs no library. Without the variables of a
service manager nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

from ...protocol.text import parse_number

log = logging.getLogger("keylane.rpc")


def notify(message: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send lines to the service manager, if there is one. A message that it does not take is
    logged, and otherwise ignored: it must not disturb the service.
    """
    path = environment.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto(message.encode(), address)
    except (OSError, ValueError) as error:
        log.warning("cannot tell the service manager %s: %s", message.partition("\n")[0], error)


def watchdog_interval_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return how often the service manager expects a sign of life, in seconds: three times in the
    span after which it kills the process. None: it does not ask.
    """
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    span_us = parse_number(environment.get("WATCHDOG_USEC", ""))
    return span_us / 3e6 if span_us else None


async def watchdog_loop() -> None:
    """Tell the service manager that this event loop runs, until cancelled. It has to be a task of
    the loop that serves: a thread would still run when that loop hangs.
    """
    interval_s = watchdog_interval_s()
    while interval_s is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)
