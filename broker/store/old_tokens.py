"""Fences tokens that were granted before an operator accepted this data folder, before any client
is served.

    BrokerWelcome.fence ─▶ FENCE [group, token, "=reset"] of every group that had a token ─▶ served

For a group without a token the fence is kept in memory only (`Store.fence_floor`). A lower token
can only come from a consumer whose group is missing in the accepted copy.

An accepted copy assigns offsets to messages although the original has assigned them to others. A
consumer that has read the original may still ack such offsets, and would thereby ack messages that
it never handled.
"""

from __future__ import annotations

from ...protocol.errors import OverloadedError
from ..partition.pull_lock import operator_session
from .store import Store


async def refuse_old_tokens(store: Store, token: int) -> None:
    """
    Refuse every token up to `token`, in all groups. A repeated call changes nothing.

    Raises:
        StorageError, BrokerReadOnlyError: some fences are not durable.
    """
    store.fence_floor = max(store.fence_floor, token)
    for partition in list(store.state.partitions.values()):
        for group in list(partition.groups.values()):
            while 0 < group.lock.fence < token:
                session = operator_session(group.lock.strategy)
                try:
                    store.raise_fence(partition, group, token=token, session=session)
                except OverloadedError:
                    await store.commit.flushed()
    await store.commit.flushed()
