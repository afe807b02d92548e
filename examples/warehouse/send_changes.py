"""Sends changes of orders, such as change data capture reads from a database.

python send_changes.py

A table is sent by columns, in the order of its rows, so the changes of an order keep theirs.
"""

import asyncio
import json
import os

import pyarrow as pa

from keylane import Producer

META = os.environ.get("KEYLANE_META", "127.0.0.1:7000")
STATES = ("placed", "paid", "shipped")


def changes_of(orders: range) -> pa.Table:
    """Each order is placed, and two of three are paid, and one of three is shipped."""
    keys, values = [], []
    for version, state in enumerate(STATES, start=1):
        for order in orders:
            if order % 3 >= version - 1:
                change = {"order": order, "version": version, "state": state, "cents": 100 * order}
                keys.append(b"%d" % order)
                values.append(json.dumps(change).encode())
    return pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


async def send(meta: str, changes: pa.Table) -> int:
    async with Producer(meta) as producer:
        receipt = await producer.send_arrow("orders", changes, key="key", value="value")
    return receipt.stored


if __name__ == "__main__":
    print(asyncio.run(send(META, changes_of(range(1, 1_001)))), "changes are stored")
