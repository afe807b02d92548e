"""An outbox of which a task died of a bug: its callers are told, and another one sends what is
left.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane.outbox import Outbox, drainer, partition_sender
from keylane.protocol.errors import Fate, InternalError
from support.cluster import Cluster
from support.outbox.rows import SETTINGS, rows_left


def fail(*_args, **_kwargs):
    raise ZeroDivisionError("a bug")


async def watch(outbox: Outbox) -> None:
    """Look at what waits, for ever."""
    while True:
        _ = outbox.waiting
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("module", "name"), [(drainer, "run_round"), (partition_sender, "islice")])
async def test_outbox_tells_that_it_has_stopped_when_a_task_died_of_a_bug(
    shared_cluster: Cluster, sqlite, monkeypatch, module, name
):
    subject = f"outbox-stopped-{name.replace('_', '-')}"
    await shared_cluster.create(subject, partitions=1)
    outbox = Outbox(shared_cluster.meta, sqlite, settings=SETTINGS)
    async with sqlite.begin() as connection:
        await outbox.add(connection, subject, b"v", key=b"k")
    with monkeypatch.context() as patched:
        patched.setattr(module, name, fail)
        await outbox.__aenter__()
        async with asyncio.timeout(20):
            with pytest.raises(InternalError, match="ZeroDivisionError") as told:
                await watch(outbox)
        assert isinstance(told.value.__cause__, ZeroDivisionError)
        with pytest.raises(InternalError) as refused:
            await outbox.send(subject, b"not added", key=b"k")
        assert refused.value.fate is Fate.NOT_DONE
        with pytest.raises(InternalError, match="has stopped sending"):
            await outbox.close()
    async with asyncio.timeout(20), Outbox(shared_cluster.meta, sqlite, settings=SETTINGS) as later:
        await later.send(subject, b"newer", key=b"k")
    await shared_cluster.check_history(subject, {b"k": [b"v", b"newer"]})


async def test_send_ends_with_an_unknown_fate_when_the_outbox_stops(
    shared_cluster: Cluster, sqlite, monkeypatch
):
    """The row is in its table."""
    await shared_cluster.create("outbox-stopped-send", partitions=1)
    outbox = Outbox(shared_cluster.meta, sqlite, settings=SETTINGS)
    monkeypatch.setattr(partition_sender, "islice", fail)
    await outbox.__aenter__()
    async with asyncio.timeout(20):
        with pytest.raises(InternalError) as unsent:
            await outbox.send("outbox-stopped-send", b"v", key=b"k")
        assert unsent.value.fate is Fate.UNKNOWN
        with pytest.raises(InternalError):
            await outbox.close()
    assert await rows_left(sqlite) == 1
