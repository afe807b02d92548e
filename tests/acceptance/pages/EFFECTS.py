"""Orders arrive before each block, and each is billed once. `store` is a table of its own that
refuses a late owner; the operations of Alembic run on another database.
"""

import sqlite3

import sqlalchemy
from alembic.migration import MigrationContext
from alembic.operations import Operations

from support.page_shop import CUSTOMERS, assert_handled, handle_all, send_orders

written = sqlite3.connect("store.db", isolation_level=None)
written.execute("CREATE TABLE kept (fence TEXT PRIMARY KEY, token INTEGER, value BLOB)")
sent = 0


class KeptValues:
    """Keeps the last value of each fence, and the highest token."""

    async def write_if(self, *, fence: str, at_least: int, value: bytes) -> None:
        done = written.execute(
            "INSERT INTO kept VALUES (?, ?, ?) ON CONFLICT (fence) DO UPDATE"
            " SET token = excluded.token, value = excluded.value WHERE token <= excluded.token",
            (fence, at_least, value),
        )
        assert done.rowcount == 1


store = KeptValues()


def migrate_up_and_down() -> None:
    engine = sqlalchemy.create_engine("sqlite:///migrated.db")
    with engine.begin() as connection:
        with Operations.context(MigrationContext.configure(connection)):
            globals()["upgrade"]()
            assert sqlalchemy.inspect(connection).has_table("keylane_sink")
            globals()["downgrade"]()
        assert not sqlalchemy.inspect(connection).get_table_names()


async def before_block(_text: str) -> None:
    await send_orders(value=b"12")


async def after_block(text: str) -> None:
    if "def upgrade" in text:
        migrate_up_and_down()
        return
    if "run()" not in text:
        await handle_all(globals()["handle"])
    await assert_handled()
    if "store.write_if" in text:
        assert written.execute("SELECT count(*) FROM kept").fetchone()[0] >= 1
        return
    globals()["sent"] += len(CUSTOMERS)
    with sqlite3.connect("shop.db") as database:
        assert database.execute("SELECT count(*) FROM bill").fetchone() == (globals()["sent"],)
