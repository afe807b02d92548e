"""The view and the worker, with a cluster in memory and virtual time."""

import asyncio

from django.conf import settings
from django.core.management import call_command
from django.db import transaction
from django.test import Client

from keylane.outbox import Outbox
from keylane.testing import VirtualCluster
from shop.billing import make_consumer
from shop.events import CODEC
from shop.management.commands.keylane_tables import create_tables
from shop.models import Bill, Order
from shop.views import place_order


async def work(meta: str) -> None:
    await make_consumer(meta).run()


async def test_order_of_a_committed_transaction_is_billed_once_when_the_worker_is_killed(
    keylane_cluster: VirtualCluster,
) -> None:
    call_command("migrate", verbosity=0)
    await create_tables()
    await keylane_cluster.create_subject("orders", partitions=2)
    worker = keylane_cluster.start(work, keylane_cluster.address)
    async with Outbox(keylane_cluster.address, settings.DATABASE_URL, codec=CODEC):
        for cents in range(1, 11):
            body = {"customer": "ada", "cents": cents}
            assert Client().post("/orders", body, "application/json").status_code == 201
        with transaction.atomic():
            place_order("ada", 99)
            transaction.set_rollback(True)
        await keylane_cluster.until(Bill.objects.exists)
        worker.kill()
        keylane_cluster.start(work, keylane_cluster.address)
        await asyncio.sleep(120)
    assert Order.objects.count() == 10
    assert list(Bill.objects.order_by("id").values_list("cents", flat=True)) == list(range(1, 11))
