"""The group `billing` handles what the page has it handle."""

from support.page_shop import assert_handled


async def after_block(text: str) -> None:
    if 'group="billing"' in text:
        await assert_handled()
