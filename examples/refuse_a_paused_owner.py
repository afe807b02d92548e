"""Pauses a worker before it writes to its database, until another worker has its partition; then
lets it continue, and shows that its write is refused.

keylane dev --subject orders        (in another terminal)
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


class Bill(Base):
    __tablename__ = "bills"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]
    worker: Mapped[str]


def say(text: str) -> None:
    print(text, flush=True)


async def work(name: str, engine: sa.Engine) -> None:
    """Write a bill for each order, and say what happens."""

    def bill(message: Message) -> None:
        say(f"{name} has order {message.offset}, with token {message.lease.token}")
        time.sleep(1)  # it computes; this is where it may be paused
        try:
            with Session(engine) as session, FencedSession(session, message) as todo:
                if todo:
                    session.add(Bill(amount=int(message.value), worker=name))
        except LeaseLostError as error:
            say(f"{name} is refused: {error.message}")
            raise
        say(f"{name} has billed order {message.offset}")

    settings = ConsumerSettings(ttl_ms=2_000, threads=1, name=name)
    consumer = Consumer(META, subject="orders", group="billing", handler=bill, settings=settings)
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
        await producer.send("orders", b"10", key="customer-7")
    with ExitStack() as workers:
        first = workers.enter_context(started("A", path))
        await asyncio.to_thread(show_until, first, "A has order")
        say("-- SIGSTOP A")
        first.send_signal(signal.SIGSTOP)
        second = workers.enter_context(started("B", path))
        await asyncio.to_thread(show_until, second, "B has billed")
        say("-- SIGCONT A")
        first.send_signal(signal.SIGCONT)
        await asyncio.to_thread(show_until, first, "A is refused")
    with Session(engine) as session:
        for each in session.scalars(sa.select(Bill)):
            say(f"the database has: {each.amount} by {each.worker}")


if not 2 <= len(sys.argv) <= 3 or sys.argv[1].startswith("-"):
    sys.exit("usage: python examples/refuse_a_paused_owner.py DATABASE_FILE")
engine = sa.create_engine(f"sqlite:///{sys.argv[1]}")
asyncio.run(work(sys.argv[2], engine) if len(sys.argv) == 3 else show(sys.argv[1], engine))
