import json

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from shop.borrowed import borrowed_transaction
from shop.events import OUTBOX, OrderPlaced
from shop.models import Order


def place_order(customer: str, cents: int) -> Order:
    """Add an order and its event, which is sent if Django's transaction commits."""
    with transaction.atomic():
        order = Order.objects.create(customer=customer, cents=cents)
        event = OrderPlaced(order.id, customer, cents)
        with borrowed_transaction() as connection:
            OUTBOX.add_sync(connection, "orders", event, key=customer.encode())
    return order


@csrf_exempt
@require_POST
def post_order(request: HttpRequest) -> JsonResponse:
    fields = json.loads(request.body)
    order = place_order(fields["customer"], fields["cents"])
    return JsonResponse({"id": order.id}, status=201)
