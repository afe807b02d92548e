"""A thousand orders that the group has not read, and a static subject with four queues."""

from keylane import Admin, Producer
from support.page_shop import META, ORDER

REFUSED = {"keylane subject cancel 17": "no such operation (operation_id=17)"}


async def prepare(_text: str) -> None:
    async with Admin(META) as admin, Producer(META) as producer:
        await admin.create_group("orders", "billing")
        await producer.send_all("orders", [(f"customer-{n}", ORDER) for n in range(1000)])


async def before_command(text: str) -> None:
    if text.startswith("keylane subject grow invoices --queues 8 --dry-run"):
        async with Admin(META) as admin:
            await admin.create_subject("invoices", static=True, partitions=4)
