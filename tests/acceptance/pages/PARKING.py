"""An order of customer-7 is parked, or becomes a dead letter, before a command is about it."""

from pathlib import Path

from keylane import Admin
from support.page_shop import META, assert_handled, handle_parked, park, send_orders


async def prepare(_text: str) -> None:
    Path("mended.json").write_text('{"total": 13}')


async def before_block(_text: str) -> None:
    await send_orders()


async def after_block(_text: str) -> None:
    await assert_handled()


async def before_command(text: str) -> str | None:
    about = text.removeprefix("keylane ").replace("orders billing ", "")
    if about.startswith(("parked list", "parked skip", "parked edit --key")):
        await park("customer-7", TimeoutError("no answer of the bank"))
    if about.startswith("parked show --error"):
        await park("customer-8", ValueError("no such town"))
    if about.startswith("dead list"):
        await handle_parked("customer-7")
    if about.startswith(("dead list", "dead retry --error")):
        await park("customer-7", TimeoutError("no answer of the bank"), to="dead")
    if "--partition 3 --offset 77" in text:
        async with Admin(META) as admin:
            messages = [each async for each in admin.parked_messages("orders", "billing")]
        place = f"--partition {messages[0].partition_id} --offset {messages[0].offset}"
        return text.replace("--partition 3 --offset 77", place)
    return None
