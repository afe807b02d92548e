"""Tokens from before an operator accepted this data folder: all are refused, durably, before anybody is served.

    BrokerWelcome.fence ─▶ FENCE [group, token, "=reset"] of every group that had a token ─▶ served

A group that had none is refused in memory: its first token is above the fence, unless the group is one that the copy
lacks, of which a consumer has an old token.

An accepted copy gives offsets away again.  Whoever read the original may still have acks for such offsets to send, and
they would be acks of other messages.
"""

from __future__ import annotations

from ...protocol.errors import OverloadedError
from ..partition.pull_lock import operator_session
from .store import Store


async def refuse_old_tokens(store: Store, token: int) -> None:
    """
    Refuse every token up to `token`, also of groups that this folder has not heard of; again does nothing.

    Raises:
        StorageError: some are not refused durably yet.
        BrokerReadOnlyError
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
