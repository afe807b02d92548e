"""The files that the page sends, and a static subject. The folders of stopped brokers are copies
of those that run.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from keylane import Admin, Message
from support.cluster import delete_group
from support.page_shop import META, handle_all, send_orders

REFUSED = {
    "keylane group reset orders billing --cancel": "the reset of group 'billing' is done",
}
CLUSTER = Path(os.environ["CLUSTER_FOLDER"])
ORDERS = '{"customer": "customer-7", "total": 12}\n{"customer": "customer-8", "total": 9}\n'


async def bill(message: Message) -> None:
    assert message.value


async def prepare(_text: str) -> None:
    Path("orders.csv").write_text("customer,total\ncustomer-7,12\ncustomer-8,9\n")
    for name in ("orders.ndjson", "orders.txt"):
        Path(name).write_text(ORDERS)
    Path("messages.ndjson").write_text('{"key": "customer-7", "value": "sent"}\n')
    async with Admin(META) as admin:
        await admin.create_subject("invoices", static=True, partitions=4)
    await send_orders()
    await handle_all(bill)


async def before_command(text: str) -> str | None:
    if text.startswith("keylane group create orders billing"):
        await delete_group(META, "orders", "billing")
    if text.startswith("keylane broker verify"):
        shutil.copytree(CLUSTER / "broker-1", "broker-1")
    if text.startswith("keylane broker index verify"):  # as after a stop; a copy has no index yet
        subprocess.run(["keylane", "broker", "index", "rebuild", "broker-1"], check=True)
    if text.startswith("keylane meta backup"):
        Path("meta").symlink_to(CLUSTER / "meta-0")
    if "53c1…" in text:
        async with Admin(META) as admin:
            at = re.search(r"[\d.]+:\d+(?=/)", text)
            listed = await admin.list_scheduled(subject="orders", broker=at[0] if at else None)
        return text.replace("53c1…", listed.messages[0].scheduled_id)
    return None
