"""Pauses a worker before it writes to its database, until another worker has its partition; then
lets it continue, and shows that its write is refused.

keylane dev --subject payments        (in another terminal)
python examples/refuse_a_paused_owner.py billing.db
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from keylane import Consumer, ConsumerSettings, LeaseLostError, Message, Producer
from keylane.sink import FencedSession, create_tables

META = os.environ.get("KEYLANE_META", "127.0.0.1:7000")


class Base(DeclarativeBase): ...


class Payment(Base):
    __tablename__ = "payments"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]
    worker: Mapped[str]


def say(text: str) -> None:
    print(text, flush=True)


async def work(name: str, engine: sa.Engine) -> None:
    """Add each payment to the table, and say what happens."""

    def record(message: Message) -> None:
        say(f"{name} has payment {message.offset}, with token {message.lease.token}")
        time.sleep(1)  # it computes; this is where it may be paused
        try:
            with Session(engine) as session, FencedSession(session, message) as todo:
                if todo:
                    session.add(Payment(amount=int(message.value), worker=name))
        except LeaseLostError as error:
            say(f"{name} is refused: {error.message}")
            raise
        say(f"{name} has written payment {message.offset}")

    settings = ConsumerSettings(ttl_ms=2_000, threads=1, name=name)
    consumer = Consumer(
        META, subject="payments", group="billing", handler=record, settings=settings
    )
    await consumer.run()


@contextmanager
def started(name: str, path: str) -> Iterator[subprocess.Popen[str]]:
    """Run a worker in its own process."""
    command = [sys.executable, __file__, path, name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.communicate()


def show_until(process: subprocess.Popen[str], words: str) -> None:
    """Print a worker's lines up to one with these words."""
    for line in process.stdout:
        say(line.rstrip())
        if words in line:
            return


async def show(path: str, engine: sa.Engine) -> None:
    await create_tables(engine)
    Base.metadata.create_all(engine)
    async with Producer(META) as producer:
        await producer.send("payments", b"10", key="customer-7")
    with ExitStack() as workers:
        first = workers.enter_context(started("A", path))
        await asyncio.to_thread(show_until, first, "A has payment")
        say("-- SIGSTOP A")
        first.send_signal(signal.SIGSTOP)
        second = workers.enter_context(started("B", path))
        await asyncio.to_thread(show_until, second, "B has written")
        say("-- SIGCONT A")
        first.send_signal(signal.SIGCONT)
        await asyncio.to_thread(show_until, first, "A is refused")
    with Session(engine) as session:
        for payment in session.scalars(sa.select(Payment)):
            say(f"the database has: {payment.amount} by {payment.worker}")


if not 2 <= len(sys.argv) <= 3 or sys.argv[1].startswith("-"):
    sys.exit("usage: python examples/refuse_a_paused_owner.py DATABASE_FILE")
engine = sa.create_engine(f"sqlite:///{sys.argv[1]}")
asyncio.run(work(sys.argv[2], engine) if len(sys.argv) == 3 else show(sys.argv[1], engine))
