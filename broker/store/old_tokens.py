"""Fences tokens that were granted before an operator accepted this data folder, before any client
is served.

    BrokerWelcome.fence ─▶ FENCE [group, token, "=reset"] of every group that had a token ─▶ served

For a group without a token the fence is in memory only (`Store.fence_floor`).  A token below it can
only come from a consumer whose group the accepted copy lacks.

An accepted copy gives offsets to messages that the original gave to others.  A consumer that has
read the original may still ack such offsets, and would ack messages that it never handled.
"""

from __future__ import annotations

from ...protocol.errors import OverloadedError
from ..partition.pull_lock import operator_session
from .store import Store


async def refuse_old_tokens(store: Store, token: int) -> None:
    """
    Refuse every token up to `token`, of all groups.  A repeat changes nothing.

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
