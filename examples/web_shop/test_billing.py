"""The shop and its billing, with a cluster in memory and virtual time."""

import asyncio
from pathlib import Path

from sqlalchemy import Engine, create_engine, select
from sqlalchemy.orm import Session

import billing
from keylane import Admin
from keylane.outbox import Outbox
from keylane.testing import VirtualCluster
from shop import CODEC, Bill, OrderPlaced, create_tables, place_order


async def make_shop(cluster: VirtualCluster, folder: Path) -> Engine:
    engine = create_engine(f"sqlite:///{folder / 'shop.db'}")
    await create_tables(engine)
    await cluster.create_subject("orders", partitions=2)
    return engine


def place(engine: Engine, outbox: Outbox[OrderPlaced], customer: str, cents: int) -> None:
    with Session(engine) as session, session.begin():
        place_order(session, outbox, customer, cents)


def bills_of(engine: Engine, customer: str) -> list[int]:
    with Session(engine) as session:
        cents = select(Bill.cents).where(Bill.customer == customer).order_by(Bill.id)
        return list(session.scalars(cents))


async def test_orders_are_billed_once_in_order_when_a_worker_is_killed(
    keylane_cluster: VirtualCluster, tmp_path: Path
) -> None:
    engine = await make_shop(keylane_cluster, tmp_path)
    worker = keylane_cluster.start(billing.main, keylane_cluster.address, engine)
    async with Outbox(keylane_cluster.address, engine, codec=CODEC) as outbox:
        for cents in range(1, 21):
            place(engine, outbox, f"customer-{cents % 2}", cents)
        await keylane_cluster.until(lambda: bills_of(engine, "customer-1"))
        worker.kill()
        keylane_cluster.start(billing.main, keylane_cluster.address, engine)
        for cents in range(21, 41):
            place(engine, outbox, f"customer-{cents % 2}", cents)
        await asyncio.sleep(120)
    assert bills_of(engine, "customer-0") == list(range(2, 41, 2))
    assert bills_of(engine, "customer-1") == list(range(1, 41, 2))
    engine.dispose()


async def test_order_without_a_price_is_parked_and_billed_in_order_once_it_has_one(
    keylane_cluster: VirtualCluster, tmp_path: Path
) -> None:
    engine = await make_shop(keylane_cluster, tmp_path)
    keylane_cluster.start(billing.main, keylane_cluster.address, engine)
    async with (
        Admin(keylane_cluster.address) as admin,
        Outbox(keylane_cluster.address, engine, codec=CODEC) as outbox,
    ):
        for customer, cents in (("ada", 1), ("ada", 0), ("ada", 3), ("bob", 4)):
            place(engine, outbox, customer, cents)
        await asyncio.sleep(60)
        assert bills_of(engine, "ada") == [1]
        assert bills_of(engine, "bob") == [4]
        (parked,) = await keylane_cluster.parked("orders", "billing")
        assert (parked.key, parked.messages) == (b"ada", 2)

        priced = CODEC.encode(OrderPlaced(2, "ada", 2))
        await admin.edit_parked("orders", "billing", key=b"ada", value=priced)
        await admin.redrive("orders", "billing", key=b"ada")
        await asyncio.sleep(60)
    assert bills_of(engine, "ada") == [1, 2, 3]
    engine.dispose()
