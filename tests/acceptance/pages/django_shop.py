"""The script of the page has sent an order at the end."""

import json

from keylane import Reader
from support.page_shop import META


async def at_end(_text: str) -> None:
    async with Reader(META, subject="orders") as reader:
        (order,) = [json.loads(message.value) async for message in reader]
    assert order == {"order_id": 1, "customer": "ada", "cents": 5}
