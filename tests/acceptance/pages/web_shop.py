"""The shop has a database of its own, and the second order of ada has no price."""

import asyncio

from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session

from keylane import Admin
from keylane.outbox import Outbox
from support.page_shop import META

DATABASE_URL = "sqlite:///shop.db"
engine = create_engine(DATABASE_URL)


async def before_command(text: str) -> str | None:
    if text.startswith("export DATABASE_URL="):
        return f"export DATABASE_URL={DATABASE_URL}"
    if text.startswith("keylane parked list"):
        await place_orders()
    return None


async def at_end(_text: str) -> None:
    async with asyncio.timeout(60):
        while bills_of("ada") != [120, 99, 3]:
            await asyncio.sleep(0.1)


async def place_orders() -> None:
    """Return when the second order of ada is parked, and that of another customer is billed."""
    import shop

    async with (
        Outbox(META, engine, codec=shop.CODEC) as outbox,
        Admin(META) as admin,
        asyncio.timeout(60),
    ):
        with Session(engine) as session, session.begin():
            for customer, cents in (("ada", 120), ("ada", 0), ("ada", 3), ("bob", 4)):
                shop.place_order(session, outbox, customer, cents)
        while (bills_of("ada"), bills_of("bob")) != ([120], [4]):
            await asyncio.sleep(0.1)
        while not [view async for view in admin.parked("orders", "billing", key="ada")]:
            await asyncio.sleep(0.1)


def bills_of(customer: str) -> list[int]:
    import shop

    chosen = select(shop.Bill.cents).where(shop.Bill.customer == customer)
    with Session(engine) as session:
        return list(session.scalars(chosen.order_by(shop.Bill.id)))
