"""Jobs of `keylane spark reprocess`. Each gets messages of a partition, in order, as a table."""

import json
from decimal import Decimal

import pyarrow as pa


def in_cents(rows: pa.Table) -> pa.Table:
    """Old orders have their total as text in euros, `"12.50"`; make it cents, as in new ones."""
    values = pa.array([convert(value) for value in rows["value"].to_pylist()], pa.binary())
    return rows.set_column(rows.schema.get_field_index("value"), "value", values)


def convert(value: bytes) -> bytes:
    order = json.loads(value)
    if "total" in order:
        order["cents"] = int(Decimal(order.pop("total")) * 100)
    return json.dumps(order).encode()
