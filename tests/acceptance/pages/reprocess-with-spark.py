"""Orders to reprocess."""

from support.page_shop import send_orders


async def prepare(_text: str) -> None:
    await send_orders()
