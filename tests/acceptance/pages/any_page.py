"""For pages that have no file of their own here: orders arrive before each block of Python, and the
group `billing` handles them.
"""

from keylane import Message
from support.page_shop import assert_handled, handle_all, send_orders


async def bill(message: Message) -> None:
    assert message.value


async def prepare(_text: str) -> None:
    await send_orders()
    await handle_all(bill)


async def before_block(_text: str) -> None:
    await send_orders()


async def after_block(text: str) -> None:
    if 'group="billing"' in text:
        await assert_handled()
