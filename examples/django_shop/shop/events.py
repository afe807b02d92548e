"""The event that an order was placed, and the outbox that sends it."""

from dataclasses import dataclass

from django.conf import settings

from keylane import JsonCodec
from keylane.outbox import Outbox


@dataclass(frozen=True)
class OrderPlaced:
    order_id: int
    customer: str
    cents: int


CODEC = JsonCodec(OrderPlaced)
OUTBOX = Outbox(settings.KEYLANE_META, settings.DATABASE_URL, codec=CODEC)
