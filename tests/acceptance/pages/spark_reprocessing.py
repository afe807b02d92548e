"""The new orders have cents, and none has its total as text."""

import json

from keylane import Reader
from support.page_shop import META


async def at_end(_text: str) -> None:
    async with Reader(META, subject="orders") as reader:
        orders = [json.loads(message.value) async for message in reader]
    assert sorted(order["cents"] for order in orders) == [700, 1250]
