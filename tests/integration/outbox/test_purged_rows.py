"""Rows that wait for a deleted subject are deleted on purpose, and never those of a subject that
exists.
"""

from __future__ import annotations

import asyncio

from keylane.outbox import Outbox, RowChange, purge_waiting
from keylane.protocol.errors import Fate, Reason
from support.cluster import Cluster, delete_subject
from support.outbox.rows import SETTINGS, rows_left
from support.raising import raises


async def test_send_is_not_told_that_a_row_is_stored_when_it_was_purged(
    shared_cluster: Cluster, sqlite
):
    """One whose row was sent before or after the purge is."""
    meta, subject = shared_cluster.meta, "outbox-purged-while-sent"
    async with Outbox(meta, sqlite, settings=SETTINGS) as outbox:
        sending = asyncio.ensure_future(outbox.send(subject, b"never stored", key=b"k"))
        while not await rows_left(sqlite):
            await asyncio.sleep(0.01)
        assert await purge_waiting(meta, sqlite, subject=subject) == RowChange(waiting=1)
        with raises(Reason.OUTBOX_ROW, match="an operator has deleted rows") as told:
            await sending
        assert told.value.fate is Fate.UNKNOWN
        await shared_cluster.create(subject, partitions=1)
        await outbox.send(subject, b"stored", key=b"k")
    await shared_cluster.check_history(subject, {b"k": [b"stored"]})


async def test_waiting_rows_are_purged_when_their_subject_is_deleted(
    shared_cluster: Cluster, sqlite
):
    """An outbox that is open meanwhile goes on; of a subject that exists they are purged by force
    alone.
    """
    meta, subject = shared_cluster.meta, "outbox-purged"
    await shared_cluster.create(subject, partitions=1)
    outbox = Outbox(meta, sqlite, settings=SETTINGS)
    async with sqlite.begin() as connection:
        for name in (subject, subject, "outbox-purged-never"):
            await outbox.add(connection, name, b"waits", key=b"k")
    with raises(Reason.OUTBOX_SUBJECT_EXISTS) as refused:
        await purge_waiting(meta, sqlite, subject=subject)
    assert (refused.value.subject, "--force" in refused.value.hint) == (subject, True)
    assert await purge_waiting(meta, sqlite, subject=subject, force=True, dry_run=True) == (
        RowChange(waiting=2)
    )
    assert await rows_left(sqlite) == 3
    await delete_subject(meta, subject)
    async with outbox:
        assert await purge_waiting(meta, sqlite, subject=subject) == RowChange(waiting=2)
        assert await purge_waiting(meta, sqlite, subject="outbox-purged-never") == (
            RowChange(waiting=1)
        )
        await shared_cluster.create(subject, partitions=1)
        await outbox.send(subject, b"later", key=b"k")
    await shared_cluster.check_history(subject, {b"k": [b"later"]})
