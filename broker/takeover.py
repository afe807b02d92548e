"""Waits at a start for the predecessor: the new program is loaded before the old one is
stopped.

Loading the program takes longer than anything else at a start, and happens while the old one still
serves. Clients then wait only for the end of the old one and the recovery of its folder.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from ..protocol.errors import AddressError, Reason
from ..rpc.listening import check_free
from .settings import BrokerSettings
from .storage.files import is_locked

log = logging.getLogger("keylane.broker")

POLL_S = 0.01


async def wait_for_predecessor(settings: BrokerSettings) -> None:
    """
    Wait at most `takeover_ms` until no other program uses the data folder and the port.

    Nothing is reserved here: the first program to take them has them, and the other one is refused.

    Raises:
        AddressError: this address can never become free for the broker.
    """
    told = False
    with suppress(TimeoutError):  # the start reports what is in use
        async with asyncio.timeout(settings.takeover_ms / 1000):
            while is_locked(str(settings.data)) or not _is_free(settings):
                if not told and settings.takeover_ms:
                    log.warning("ready to take over: stop the broker that uses %s", settings.data)
                told = True
                await asyncio.sleep(POLL_S)


def _is_free(settings: BrokerSettings) -> bool:
    try:
        check_free(settings.host, settings.port, anywhere=settings.is_open)
    except AddressError as error:
        if error.reason is Reason.INSECURE_HOST:
            raise
        return False
    return True
