"""One trace from an HTTP request through a message to the database, on real servers; threads,
`keylane.sync` and the outbox carry it too.
"""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.instrumentation.sqlalchemy import SQLAlchemyInstrumentor
from opentelemetry.sdk.trace import ReadableSpan
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

import keylane.sync
from keylane import Consumer, ConsumerSettings, Message, Producer
from keylane.otel import process
from keylane.outbox import Outbox, create_tables
from support.cluster import Cluster
from support.outbox.rows import SETTINGS
from support.spans import Spans, is_child, linked_ids

numbers = itertools.count(1)
BILLS = sa.Table(
    "bills",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("value", sa.LargeBinary),
)


@pytest.fixture
async def subject(shared_cluster: Cluster) -> str:
    name = f"traced-{next(numbers)}"
    await shared_cluster.create(name, partitions=2)
    return name


@pytest.fixture
def spans() -> Iterator[Spans]:
    with Spans.instrumented() as spans:
        yield spans


@pytest.fixture
async def engine(spans: Spans, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    """The database of a program, whose statements are traced."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'user.db'}")
    async with engine.begin() as connection:
        await connection.run_sync(BILLS.metadata.create_all)
    instrumentor = SQLAlchemyInstrumentor()
    instrumentor.instrument(
        engine=engine.sync_engine,
        tracer_provider=spans.provider,
        skip_dep_check=True,  # it has not been declared for SQLAlchemy 2.1 yet
    )
    yield engine
    instrumentor.uninstrument()
    await engine.dispose()


async def insert_under(spans: Spans, parent: ReadableSpan) -> ReadableSpan:
    """Wait for the statement that is a child of a span."""
    async with asyncio.timeout(60):
        while True:
            for span in spans.named(""):
                is_insert = span.attributes.get("db.statement", "").startswith("INSERT INTO bills")
                if is_insert and is_child(span, parent):
                    return span
            await asyncio.sleep(0.01)


async def test_request_message_handler_and_statement_are_one_trace(
    shared_cluster: Cluster, subject: str, spans: Spans, engine: AsyncEngine
):
    async def bill(message: Message) -> None:
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(sa.insert(BILLS), {"value": message.value})

    app = FastAPI()
    FastAPIInstrumentor.instrument_app(app, tracer_provider=spans.provider)
    transport = httpx.ASGITransport(app)
    async with (
        Producer(shared_cluster.meta) as producer,
        Consumer(shared_cluster.meta, subject=subject, group="billing", handler=bill),
        httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
    ):

        @app.post("/orders/{number}")
        async def post_order(number: int) -> dict[str, int]:
            receipt = await producer.send(subject, b"order", key=str(number))
            return {"offset": receipt.offset}

        answers = [client.post(f"/orders/{number}") for number in range(5)]
        assert {answer.status_code for answer in await asyncio.gather(*answers)} == {200}
        await spans.wait(f"process {subject}", 5)
        requests = await spans.wait("POST /orders/{number}", 5)
        sends = spans.named(f"send {subject}")
        assert len(sends) == 5, "each request has a context of its own"
        for sent in sends:
            (request,) = [each for each in requests if is_child(sent, each)]
            (processed,) = [
                each for each in spans.named(f"process {subject}") if is_child(each, sent)
            ]
            statement = await insert_under(spans, processed)
            assert statement.context.trace_id == request.context.trace_id
        acked = (await spans.wait(f"ack {subject}"))[0]
    assert acked.context.trace_id in {each.context.trace_id for each in requests} or acked.links


async def test_handler_in_a_thread_works_inside_its_process_span(
    shared_cluster: Cluster, subject: str, spans: Spans
):
    threads = set()

    def handle(_message: Message) -> None:
        threads.add(threading.current_thread().name)
        with spans.begin("work"):
            pass

    settings = ConsumerSettings(threads=2)
    async with (
        Producer(shared_cluster.meta) as producer,
        Consumer(
            shared_cluster.meta, subject=subject, group="g", handler=handle, settings=settings
        ),
    ):
        for number in range(4):
            await producer.send(subject, b"1", key=str(number))
        worked = await spans.wait("work", 4)
        processed = await spans.wait(f"process {subject}", 4)
    assert threading.main_thread().name not in threads
    assert all(any(is_child(work, each) for each in processed) for work in worked)
    sends = spans.named(f"send {subject}")
    assert all(any(is_child(each, sent) for sent in sends) for each in processed)


def test_trace_goes_on_from_thread_to_thread_of_a_program_without_a_loop(
    shared_cluster: Cluster, spans: Spans
):
    subject = f"traced-{next(numbers)}"
    asyncio.run(shared_cluster.create(subject, partitions=1))
    with keylane.sync.Producer(shared_cluster.meta) as producer:
        with spans.begin("request"):
            producer.send(subject, b"1", key="a").result()
        with spans.begin("import"):
            producer.send_all(subject, [("a", b"2"), ("a", b"3")])
    with keylane.sync.Consumer(shared_cluster.meta, subject=subject, group="g") as consumer:
        for taken in consumer:
            with process(taken.message), spans.begin("work"):
                pass
            taken.ack()
            if taken.value == b"3":
                break
    (request,), (imported,) = spans.named("request"), spans.named("import")
    alone, together = spans.named(f"send {subject}")
    assert is_child(alone, request)
    assert is_child(together, imported)
    processed = spans.named(f"process {subject}")
    assert [is_child(each, alone) for each in processed] == [True, False, False]
    assert [is_child(each, together) for each in processed] == [False, True, True]
    assert all(map(is_child, spans.named("work"), processed))


async def test_trace_of_a_transaction_goes_on_when_its_outbox_sends_the_message(
    shared_cluster: Cluster, subject: str, spans: Spans, engine: AsyncEngine
):
    async def handle(_message: Message) -> None: ...

    await create_tables(engine)
    async with (
        Outbox(shared_cluster.meta, engine, settings=SETTINGS) as outbox,
        Consumer(shared_cluster.meta, subject=subject, group="g", handler=handle),
    ):
        with spans.begin("request"):
            async with AsyncSession(engine) as session, session.begin():
                for _ in range(2):
                    await outbox.add(session, subject, b"1", key="a")
        created = await spans.wait(f"create {subject}", 2)
        processed = await spans.wait(f"process {subject}", 2)
        sends = await spans.wait(f"send {subject}")
    (request,) = spans.named("request")
    assert all(is_child(each, request) for each in created)
    assert all(map(is_child, processed, created))
    linked = sorted(span_id for sent in sends for span_id in linked_ids(sent))
    assert linked == sorted(each.context.span_id for each in created)
