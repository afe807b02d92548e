"""Orders to read, and subjects for what streams write; each query handles what is there."""

from keylane import Admin
from support.page_shop import META, send_orders


async def prepare(_text: str) -> None:
    async with Admin(META) as admin:
        for subject in ("copies", "totals"):
            await admin.create_subject(subject)
    await send_orders()


def after_block(text: str) -> None:
    if ".start()" in text:
        query = globals()["query"]
        query.processAllAvailable()
        query.stop()
        assert query.exception() is None
