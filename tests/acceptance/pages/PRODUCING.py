"""A subject for reminders."""

from keylane import Admin
from support.page_shop import META, assert_handled


async def prepare(_text: str) -> None:
    async with Admin(META) as admin:
        await admin.create_subject("reminders")


async def after_block(text: str) -> None:
    if 'group="billing"' in text:
        await assert_handled()
