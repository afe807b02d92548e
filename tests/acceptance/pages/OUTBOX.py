"""What the outbox has sent is in the subject; the operations of Alembic run on another database."""

import asyncio

import sqlalchemy
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy.ext.asyncio import create_async_engine

from keylane import Reader
from keylane.outbox import Outbox
from support.page_shop import META

REFUSED = {
    "keylane outbox purge --waiting --subject orders --database-url sqlite:///shop.db": "orders",
}


async def assert_sent(count: int) -> None:
    """What was added is stored; a process with an open outbox sends what others left."""
    engine = create_async_engine("sqlite+aiosqlite:///shop.db")
    async with Outbox(META, engine) as outbox, asyncio.timeout(60):
        while (await outbox.gauges()).rows:
            await asyncio.sleep(0.05)
    await engine.dispose()
    async with Reader(META, "orders") as reader:
        assert len([message async for message in reader]) == count


def migrate_up_and_down() -> None:
    engine = sqlalchemy.create_engine("sqlite:///migrated.db")
    with engine.begin() as connection:
        with Operations.context(MigrationContext.configure(connection)):
            globals()["upgrade"]()
            assert sqlalchemy.inspect(connection).has_table("keylane_outbox")
            globals()["downgrade"]()
        assert not sqlalchemy.inspect(connection).get_table_names()


async def after_block(text: str) -> None:
    if "add_sync" in text:
        await assert_sent(2)
    elif "outbox.add(" in text:
        await assert_sent(1)
    elif "def upgrade" in text:
        migrate_up_and_down()
