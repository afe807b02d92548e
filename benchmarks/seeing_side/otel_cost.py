"""Measures what the traces of `keylane[otel]` cost a program; prints JSON.

`PYTHONPATH=benchmarks python benchmarks/seeing_side/otel_cost.py [--quick]`

The program is a service: an HTTP request (FastAPI) with an order of three lines sends it as a
message and waits for the receipt, and the handler bills it in a transaction of three statements
(SQLAlchemy, SQLite in memory). OpenTelemetry traces requests and statements in all modes, and
keylane in half of them, so that a ratio is keylane's share. Spans go to the SDK's batch processor,
whose exporter drops them.

| key | what |
| --- | --- |
| `otel_cost_ratio` | requests a second of processor time, each sampled |
| `otel_unsampled_ratio` | the same, none sampled |
| `otel_bulk_ratio` | the same for `send_all` and a handler that does nothing, each sampled |
| `otel_bulk_unsampled_ratio` | the same, none sampled |

Clients of all modes are open in one process and take turns of a tenth of a second, because a
machine with other work changes its speed by more than what is measured. A figure is that of a
mode's best turn, because other work only adds to it: caches that it has emptied make every call
slower. Processor time is that of all threads of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa
from fastapi import FastAPI
from main_path import BenchCluster
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, Tracer
from pydantic import BaseModel
from roles import KEYS, VALUE
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import StaticPool

from keylane import Consumer, Message, Producer, PydanticCodec
from keylane.otel import KeylaneInstrumentor


@dataclass(frozen=True)
class Mode:
    """How much is traced."""

    is_sampled: bool
    is_keylane_traced: bool


SAMPLED, UNSAMPLED = Mode(True, True), Mode(False, True)
BESIDE = {SAMPLED: Mode(True, False), UNSAMPLED: Mode(False, False)}
"""Each mode, and the one that it is compared with."""
MODES = (*BESIDE, *BESIDE.values())
IN_FLIGHT = 32
"""How many requests are made at once."""
REQUESTS, BULK = 100, 5_000
"""The messages of a turn."""
Turn = Callable[[], Awaitable[None]]


class DroppingExporter(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def new_provider(mode: Mode) -> TracerProvider:
    """Return a provider whose spans are dropped."""
    provider = TracerProvider(sampler=ParentBased(ALWAYS_ON if mode.is_sampled else ALWAYS_OFF))
    provider.add_span_processor(BatchSpanProcessor(DroppingExporter()))
    return provider


@contextmanager
def tracing(mode: Mode, provider: TracerProvider) -> Iterator[None]:
    """Let clients that are opened in the block trace, if the mode says so."""
    if not mode.is_keylane_traced:
        yield
        return
    KeylaneInstrumentor().instrument(tracer_provider=provider)
    yield
    KeylaneInstrumentor().uninstrument()


class Counted:
    """Waits until so many messages are handled."""

    def __init__(self) -> None:
        self._left, self._done = 0, asyncio.Event()

    def expect(self, count: int) -> None:
        self._left = count
        self._done.clear()

    def note(self) -> None:
        self._left -= 1
        if not self._left:
            self._done.set()

    async def wait(self) -> None:
        await self._done.wait()


class Line(BaseModel):
    product: str
    count: int
    cents: int


class Order(BaseModel):
    customer: str
    lines: list[Line]


class Base(DeclarativeBase): ...


class Account(Base):
    __tablename__ = "accounts"
    customer: Mapped[str] = mapped_column(primary_key=True)
    cents: Mapped[int]


class Bill(Base):
    __tablename__ = "bills"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    cents: Mapped[int]


def open_database(tracer: Tracer) -> sa.Engine:
    """Return a database in memory with an account for each key. Each statement has a span."""
    engine = sa.create_engine("sqlite://", poolclass=StaticPool)
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all(Account(customer=key.decode(), cents=0) for key in KEYS[:REQUESTS])

    def begin(_c: object, _cursor: object, statement: str, _p: object, run: Any, _m: bool) -> None:
        attributes = {"db.system.name": "sqlite", "db.query.text": statement}
        name = statement.partition(" ")[0]
        run.span = tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)

    def end(_c: object, _cursor: object, _s: str, _p: object, run: Any, _m: bool) -> None:
        run.span.end()

    sa.event.listen(engine, "before_cursor_execute", begin)
    sa.event.listen(engine, "after_cursor_execute", end)
    return engine


async def open_service(
    meta: str, subject: str, provider: TracerProvider, stack: AsyncExitStack
) -> Turn:
    """Open the service. Return what makes REQUESTS requests, until all are handled."""
    engine = open_database(provider.get_tracer("database"))
    stack.callback(engine.dispose)
    handled = Counted()
    codec = PydanticCodec(Order)

    async def handle(message: Message[Order]) -> None:
        order = message.decode()
        cents = sum(line.count * line.cents for line in order.lines)
        with Session(engine) as session, session.begin():
            account = session.get_one(Account, order.customer)
            account.cents += cents
            session.add(Bill(customer=order.customer, cents=cents))
        handled.note()

    producer = await stack.enter_async_context(Producer(meta, codec=codec))
    await stack.enter_async_context(
        Consumer(meta, subject=subject, group="service", handler=handle, codec=codec)
    )
    app = FastAPI()
    FastAPIInstrumentor.instrument_app(app, tracer_provider=provider)

    @app.post("/orders")
    async def post_order(order: Order) -> dict[str, int]:
        receipt = await producer.send(subject, order, key=order.customer)
        return {"offset": receipt.offset}

    client = await stack.enter_async_context(
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service")
    )
    lines = [{"product": f"product-{number}", "count": 1, "cents": 999} for number in range(3)]

    async def ask(first: int) -> None:
        for number in range(first, REQUESTS, IN_FLIGHT):
            order = {"customer": KEYS[number].decode(), "lines": lines}
            (await client.post("/orders", json=order)).raise_for_status()

    async def take_turn() -> None:
        handled.expect(REQUESTS)
        await asyncio.gather(*map(ask, range(IN_FLIGHT)))
        await handled.wait()

    return take_turn


async def open_bulk(
    meta: str, subject: str, _provider: TracerProvider, stack: AsyncExitStack
) -> Turn:
    """Open a producer and a consumer. Return what sends BULK messages, until all are handled."""
    handled = Counted()

    async def handle(_message: Message) -> None:
        handled.note()

    producer = await stack.enter_async_context(Producer(meta))
    await stack.enter_async_context(Consumer(meta, subject=subject, group="bulk", handler=handle))
    messages = [(KEYS[number], VALUE) for number in range(BULK)]

    async def take_turn() -> None:
        handled.expect(BULK)
        await producer.send_all(subject, messages)
        await handled.wait()

    return take_turn


async def take_turns(
    open_program: Callable[[str, str, TracerProvider, AsyncExitStack], Awaitable[Turn]],
    cluster: BenchCluster,
    rounds: int,
) -> dict[Mode, list[float]]:
    """Return the processor time of each mode's turns, in seconds."""
    took_s: dict[Mode, list[float]] = {mode: [] for mode in MODES}
    async with AsyncExitStack() as stack:
        turns: dict[Mode, Turn] = {}
        for mode in MODES:
            provider = new_provider(mode)
            with tracing(mode, provider):
                subject = f"{open_program.__name__}-{len(turns)}"
                await asyncio.to_thread(cluster.create, subject)
                turns[mode] = await open_program(cluster.meta, subject, provider, stack)
                await turns[mode]()
        for number in range(rounds):
            for mode in MODES[number % 4 :] + MODES[: number % 4]:
                gc.collect()
                began = time.process_time()
                await turns[mode]()
                took_s[mode].append(time.process_time() - began)
    return took_s


def ratio(took_s: dict[Mode, list[float]], mode: Mode) -> float:
    """Return how many messages a mode handles by those of the one beside it."""
    return round(min(took_s[BESIDE[mode]]) / min(took_s[mode]), 3)


def cpu_us(took_s: dict[Mode, list[float]], mode: Mode, count: int) -> list[float]:
    """Return the time a message without and with keylane's spans, in microseconds."""
    return [round(min(took_s[each]) / count * 1e6, 1) for each in (BESIDE[mode], mode)]


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Measure with a cluster of its own."""
    rounds = 20 if quick else 100
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = BenchCluster(Path(folder), stack)
        service = asyncio.run(take_turns(open_service, cluster, rounds))
        bulk = asyncio.run(take_turns(open_bulk, cluster, rounds))
    return {
        "otel_cost_ratio": ratio(service, SAMPLED),
        "otel_unsampled_ratio": ratio(service, UNSAMPLED),
        "otel_bulk_ratio": ratio(bulk, SAMPLED),
        "otel_bulk_unsampled_ratio": ratio(bulk, UNSAMPLED),
        "otel_request_cpu_us": {
            "sampled": cpu_us(service, SAMPLED, REQUESTS),
            "unsampled": cpu_us(service, UNSAMPLED, REQUESTS),
        },
        "otel_bulk_cpu_us": {
            "sampled": cpu_us(bulk, SAMPLED, BULK),
            "unsampled": cpu_us(bulk, UNSAMPLED, BULK),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    print(json.dumps(measure(quick=parser.parse_args().quick), indent=1))


if __name__ == "__main__":
    main()
