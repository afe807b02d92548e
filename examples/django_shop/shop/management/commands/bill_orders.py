import asyncio
import logging

from django.conf import settings
from django.core.management.base import BaseCommand

from shop.billing import make_consumer
from shop.events import OUTBOX


async def work() -> None:
    async with OUTBOX:  # while it is open, this process sends what others have committed
        await make_consumer(settings.KEYLANE_META).run()


class Command(BaseCommand):
    help = "Sends the outbox and bills orders, until SIGTERM."

    def handle(self, **_options: object) -> None:
        logging.basicConfig(level=logging.INFO)
        asyncio.run(work())
