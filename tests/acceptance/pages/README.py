"""The key of customer-7 is parked before somebody looks at it."""

from support.page_shop import park


async def before_command(text: str) -> None:
    if "parked list" in text:
        await park("customer-7", ValueError("no such customer"))
