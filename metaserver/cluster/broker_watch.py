"""Logs each broker group once when it is registered, falls silent, is heard again, or moves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...protocol.control import BrokerView
from ...protocol.errors import KeylaneError
from ...protocol.text import format_seconds
from ..sql.database import Database
from .brokers import broker_views

log = logging.getLogger("keylane.metaserver")
WATCH_S = 1.0
"""The interval between two looks at the brokers, in seconds."""


class _Line(NamedTuple):
    level: int
    text: str


class BrokerWatch:
    """Watches the broker groups in the database, also those that report to other metaservers."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def run(self) -> None:
        """Log changes until cancelled."""
        known: Mapping[str, BrokerView] | None = None
        while True:
            try:
                views = await self._database.read(broker_views)
            except KeylaneError:
                pass  # the health report has it
            else:
                for line in describe_changes(known, views):
                    log.log(line.level, "%s", line.text)
                known = {view.broker_group: view for view in views}
            await asyncio.sleep(WATCH_S)


def describe_changes(
    known: Mapping[str, BrokerView] | None, views: Iterable[BrokerView]
) -> list[_Line]:
    """Return the lines about what has changed since the last look; None: this is the first one,
    which has lines for silent groups only.
    """
    lines = []
    for view in views:
        name = f"broker group {view.broker_group}"
        before = None if known is None else known.get(view.broker_group)
        if not view.available:
            if before is None or before.available:
                silence = f"nothing was heard for {format_seconds(view.silent_ms)}"
                text = f"{name} at {view.address} is silent: {silence}"
                lines.append(_Line(logging.WARNING, text))
        elif known is not None and before is None:
            lines.append(_Line(logging.INFO, f"{name} is registered at {view.address}"))
        elif before is not None and not before.available:
            text = (
                f"{name} is heard again, at {view.address}"
                if before.address == view.address
                else f"{name} is served at {view.address} now, in place of {before.address}"
            )
            lines.append(_Line(logging.WARNING, text))
        elif before is not None and before.address != view.address:
            lines.append(_Line(logging.INFO, f"{name} has moved to {view.address}"))
    return lines
