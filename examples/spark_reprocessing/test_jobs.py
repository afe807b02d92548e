"""The job, on messages that a cluster in memory has stored."""

import json

import pyarrow as pa

from jobs import in_cents
from keylane import Producer
from keylane.testing import VirtualCluster


async def test_old_orders_get_cents_and_new_ones_stay(keylane_cluster: VirtualCluster) -> None:
    await keylane_cluster.create_subject("orders", partitions=1)
    async with Producer(keylane_cluster.address) as producer:
        for order in ({"total": "12.50"}, {"cents": 7}):
            await producer.send("orders", json.dumps(order).encode(), key=b"ada")
    messages = await keylane_cluster.messages("orders")
    rows = pa.table(
        {
            "partition": [message.partition_id for message in messages],
            "offset": [message.offset for message in messages],
            "key": [message.key for message in messages],
            "value": [message.value for message in messages],
        }
    )
    made = in_cents(rows)
    assert [json.loads(value) for value in made["value"].to_pylist()] == [
        {"cents": 1250},
        {"cents": 7},
    ]
    assert made.drop_columns("value").equals(rows.drop_columns("value"))
