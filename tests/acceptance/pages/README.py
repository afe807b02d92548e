"""The key of customer-7 is parked before somebody looks at it."""

from keylane import Admin
from support.page_shop import META, park


async def before_command(text: str) -> None:
    if "parked list" in text:
        async with Admin(META) as admin:  # the fifth try comes soon
            await admin.set_group("orders", "billing", backoff_first_ms=10, backoff_max_ms=10)
        await park("customer-7", ValueError("no such customer"))
