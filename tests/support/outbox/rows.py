"""What tests of the outbox ask its tables."""

from __future__ import annotations

import asyncio

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from keylane.outbox import OutboxSettings

SETTINGS = OutboxSettings(rescan_ms=100, lease_ms=1_000)
"""Of outboxes that notice each other soon."""


async def rows_left(engine: AsyncEngine) -> int:
    """Rows of the outbox, of any state."""
    async with engine.connect() as connection:
        counted = await connection.execute(sa.text("SELECT count(*) FROM keylane_outbox"))
        left: int = counted.scalar_one()
    return left


async def drained(engine: AsyncEngine, *, seconds: float = 30.0) -> None:
    """Wait until every row is sent."""
    async with asyncio.timeout(seconds):
        while await rows_left(engine):
            await asyncio.sleep(0.01)
