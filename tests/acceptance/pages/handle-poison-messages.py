"""The key of customer-7 is parked before somebody looks at it, and again after its redrive."""

from pathlib import Path

from keylane import Admin
from support.page_shop import META, assert_handled, park, send_orders


async def prepare(_text: str) -> None:
    Path("mended.json").write_text('{"total": 13}')


async def before_block(_text: str) -> None:
    await send_orders()


async def after_block(_text: str) -> None:
    await assert_handled()


async def before_command(text: str) -> None:
    if "parked list" in text or "parked skip" in text:
        async with Admin(META) as admin:  # the fifth try comes soon
            await admin.set_group("orders", "billing", backoff_first_ms=10, backoff_max_ms=10)
        await park("customer-7", ValueError("no such customer"))
