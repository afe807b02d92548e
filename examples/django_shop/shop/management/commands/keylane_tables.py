import asyncio

from django.conf import settings
from django.core.management.base import BaseCommand

from keylane import outbox, sink


async def create_tables() -> None:
    await outbox.create_tables(settings.DATABASE_URL)
    await sink.create_tables(settings.DATABASE_URL)


class Command(BaseCommand):
    help = "Creates the tables of keylane's outbox and of fenced effects."

    def handle(self, **_options: object) -> None:
        asyncio.run(create_tables())
