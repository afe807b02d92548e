"""Bills each order once, in Django's transaction."""

from django.db import close_old_connections, transaction

from keylane import Consumer, ConsumerSettings, Message
from keylane.sink import fenced
from shop.borrowed import borrowed_transaction
from shop.events import CODEC, OrderPlaced
from shop.models import Bill


def handle(message: Message[OrderPlaced]) -> None:
    close_old_connections()  # threads live long, and a connection may have been lost
    order = message.decode()
    with (
        transaction.atomic(),
        borrowed_transaction() as connection,
        fenced(connection, message) as todo,
    ):
        if todo:
            Bill.objects.create(order_id=order.order_id, customer=order.customer, cents=order.cents)


def make_consumer(meta: str) -> Consumer[OrderPlaced]:
    return Consumer(
        meta,
        subject="orders",
        group="billing",
        handler=handle,
        codec=CODEC,
        on_failure="park",
        tries_max=5,
        settings=ConsumerSettings(threads=4),
    )
