"""Opens the admin client of a command; imports the network library lazily, because --help does not
need it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .options import WAIT_S

if TYPE_CHECKING:
    from ..admin import Admin

POLL_SECONDS = 0.02


def open_admin(meta: str) -> Admin:
    """Return an admin client for the metaservers at `meta`, to be opened with `async with`; raise
    ConfigError.
    """
    from ..admin import Admin

    return Admin(meta, wait_s=WAIT_S.get())


async def wait_for_brokers(admin: Admin, count: int) -> None:
    """Wait until `count` broker groups are available."""
    while True:
        brokers = (await admin.list_brokers()).brokers
        if sum(broker.available for broker in brokers) >= count:
            return
        await asyncio.sleep(POLL_SECONDS)
