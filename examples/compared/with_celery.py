"""The service with Redis and Celery, and by_hand.py.

python by_hand.py tables
python by_hand.py place < orders.jsonl
python with_celery.py relay
python with_celery.py work
"""

import json
import os
import sys
import time
from typing import Any

from celery import Celery, Task
from sqlalchemy import create_engine

import by_hand
from shop import DATABASE_URL, Order, bill

engine = create_engine(DATABASE_URL)
app = Celery("shop", broker=os.environ.get("REDIS", "redis://127.0.0.1:6379/0"))
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    broker_transport_options={"visibility_timeout": 10},
)


def relay() -> None:
    """Send what is in the outbox. Events are sent again if the relay dies before its commit."""
    while True:
        with engine.begin() as connection:
            events = by_hand.oldest_events(connection)
            for row in events:
                handle.delay(json.loads(row.event))
            by_hand.delete_events(connection, events)
        if not events:
            time.sleep(0.1)


# Celery keeps no order. An order that comes before an earlier one of its customer goes back to the
# queue, and is tried again a little later.
@app.task(bind=True, max_retries=None, name="bill")
def handle(self: Task, fields: dict[str, Any], failures: int = 0) -> None:
    order = Order(**fields)
    try:
        with engine.begin() as connection:
            by_hand.handle_once(connection, order, bill)
    except by_hand.TooEarlyError as error:
        raise self.retry(exc=error, countdown=0.2) from error
    except Exception as error:
        if failures + 1 < by_hand.TRIES:
            pause_s = 0.1 * 2**failures
            raise self.retry((fields, failures + 1), exc=error, countdown=pause_s) from error
        with engine.begin() as connection:
            by_hand.park(connection, order, repr(error))


def work() -> None:
    app.worker_main(["worker", "--concurrency=4", "--loglevel=WARNING"])


if __name__ == "__main__":
    {"relay": relay, "work": work}[sys.argv[1]]()
