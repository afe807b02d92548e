"""Opens the admin client for a command. Imports the network library lazily, because --help does not
need it.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from .options import WAIT_S

if TYPE_CHECKING:
    from ..admin import Admin

POLL_SECONDS = 0.02


def open_admin(meta: str) -> Admin:
    """Return an admin client for the metaservers at `meta`, to be opened with `async with`. Raises
    ConfigError.
    """
    from ..admin import Admin

    return Admin(meta, wait_s=WAIT_S.get())


def import_network() -> None:
    """
    Import the network library, without the certificates of public authorities.

    aiohttp would read them during its import, which would take 50 ms of the 200 ms that a command
    takes. Connections to keylane servers do not use them, because they name the cluster's own
    authority.
    """
    before = {name: os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")}
    os.environ.update(dict.fromkeys(before, os.devnull))
    try:
        from ..rpc import http_network  # noqa: F401 - commands import it again
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def wait_for_brokers(admin: Admin, count: int) -> None:
    """Wait until `count` broker groups are available."""
    while True:
        brokers = (await admin.list_brokers()).brokers
        if sum(broker.available for broker in brokers) >= count:
            return
        await asyncio.sleep(POLL_SECONDS)
