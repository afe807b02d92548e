"""The copy has all changes in files at the end."""

import asyncio
from pathlib import Path

import pyarrow.parquet

from keylane import Admin
from support.page_shop import META

CHANGES = 2_000
"""Three states of every third order, two of the next, and one of the rest, of 1,000 orders."""


async def at_end(_text: str) -> None:
    async with Admin(META) as admin, asyncio.timeout(60):
        while await admin.lag("orders", "warehouse"):
            await asyncio.sleep(0.1)
    files = Path("files").glob("*.parquet")
    assert sum(pyarrow.parquet.read_metadata(file).num_rows for file in files) == CHANGES
