"""Opens the admin client of a command; the network library is imported only then, because the help
needs none.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .options import WAIT_S

if TYPE_CHECKING:
    from ..admin import Admin

POLL_SECONDS = 0.02


def open_admin(meta: str) -> Admin:
    """Return an admin client for `async with`, of the metaservers at `meta`; raise ConfigError."""
    from ..admin import Admin

    return Admin(meta, wait_s=WAIT_S.get())


async def available_brokers(admin: Admin, count: int) -> None:
    """Wait until `count` broker groups are available."""
    while True:
        listed = await admin.list_brokers()
        if sum(broker.available for broker in listed.brokers) >= count:
            return
        await asyncio.sleep(POLL_SECONDS)
