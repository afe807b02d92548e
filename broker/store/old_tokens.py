"""Refuses, durably, all tokens from before an operator accepted this data folder, before any client is served.

    BrokerWelcome.fence ─▶ FENCE [group, token, "=reset"] of every group that had a token ─▶ served

A group without a token here is refused in memory: its first token is above the fence, unless the copy lacks the group
and a consumer still has an old token of it.

An accepted copy gives the same offsets to other messages.  A consumer that read the original may still send acks for such
offsets; they would ack messages that it never handled.
"""

from __future__ import annotations

from ...protocol.errors import OverloadedError
from ..partition.pull_lock import operator_session
from .store import Store


async def refuse_old_tokens(store: Store, token: int) -> None:
    """
    Refuse every token up to `token`, also of groups that this folder lacks; a repeat does nothing.

    Raises:
        StorageError: some tokens are not refused durably yet.
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
