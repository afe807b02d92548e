"""An outbox leaves its lease when the event loop ends, so that the next process sends at once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from keylane.outbox import Outbox, create_tables, lease
from keylane.outbox.tables import OutboxTables
from keylane.protocol.errors import NotSentError
from keylane.rpc.environment import Environment
from keylane.rpc.network import Network


class NoServer(Network):
    """A network in which nothing answers."""

    async def control(self, *_: Any, **__: Any) -> Any:
        raise NotSentError("no server")

    async def close(self) -> None:
        """Close nothing."""


async def holder(engine: sa.Engine) -> Outbox:
    """An open outbox that holds the lease, because a row waits."""
    outbox = Outbox("127.0.0.1:7000", engine, _environment=Environment(network=NoServer()))
    await outbox.__aenter__()
    with engine.begin() as connection:
        outbox.add_sync(connection, "s", b"waits")
    while outbox._drainer is None or outbox._drainer.token is None:
        await asyncio.sleep(0.01)
    return outbox


@pytest.mark.parametrize("turns", [None, 0, 1, 2, 3, 5])
def test_lease_is_released_when_the_event_loop_ends_before_or_while_the_outbox_is_closed(
    tmp_path: Path, turns: int | None
):
    """`asyncio.run` cancels what is left: no close (None), or one that has had a few turns of the
    event loop.
    """
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'outbox.db'}")
    outboxes: list[Outbox] = []

    async def program() -> None:
        await create_tables(engine)
        outbox = await holder(engine)
        outboxes.append(outbox)
        if turns is not None:
            closing = asyncio.create_task(outbox.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            assert not closing.done()

    asyncio.run(program())
    with engine.connect() as connection:
        assert connection.execute(sa.select(OutboxTables().lease.c.until_ms)).scalar_one() == 0
    assert outboxes[0]._connections.loop_binding.state == ("open" if turns is None else "closed")
    engine.dispose()


def test_lease_is_released_when_the_event_loop_ends_while_a_thread_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The transaction goes on in its thread when the task is cancelled that waits for it."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'outbox.db'}")
    acquire, tokens = lease.acquire, []

    def slowly(*given: Any, **named: Any) -> int | None:
        tokens.append(acquire(*given, **named))
        time.sleep(0.1)
        return tokens[0]

    monkeypatch.setattr(lease, "acquire", slowly)

    async def program() -> None:
        await create_tables(engine)
        outbox = Outbox("127.0.0.1:7000", engine, _environment=Environment(network=NoServer()))
        await outbox.__aenter__()
        with engine.begin() as connection:
            outbox.add_sync(connection, "s", b"waits")
        while not tokens:
            await asyncio.sleep(0.001)
        assert outbox._drainer is not None
        assert outbox._drainer.token is None

    asyncio.run(program())
    assert tokens == [1]
    with engine.connect() as connection:
        assert connection.execute(sa.select(OutboxTables().lease.c.until_ms)).scalar_one() == 0
    engine.dispose()
