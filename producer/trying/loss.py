"""Asks the metaserver whether a doubtful batch is lost together with its broker."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from ...protocol.errors import KeylaneError, SubjectUnknownError
from ...protocol.routing import Partition
from ..executor_state import ExecutorState, MessageGroup
from ..failure import WRONG_BROKER_ERRORS

log = logging.getLogger("keylane.producer")


class InDoubtExecutor(Protocol):
    """An executor whose oldest batch is doubtful."""

    group: MessageGroup
    partition: Partition
    state: ExecutorState


async def is_unrecoverable(
    executor: InDoubtExecutor,
    error: KeylaneError,
    fetch_history: Callable[[], Awaitable[Collection[str]]],
) -> bool:
    """
    Return True if no broker knows whether the oldest batch is stored, and the loss has not been
    accepted.

    A broker that does not know the partition may have replaced a lost broker, or may have taken
    over the address of a broker that moved. The metaserver knows which is the case. It is asked
    after the refusal, because an earlier reply may be out of date.

    Args:
        error: the broker's refusal.
        fetch_history: see `ExecutorOwner.fetch_history`; it changes `executor`.
    """
    state, address = executor.state, executor.partition.address
    if state.lost or not (state.unlisted and isinstance(error, WRONG_BROKER_ERRORS)):
        return False
    try:
        if executor.partition.broker_group in await fetch_history():
            return False
    except SubjectUnknownError:
        pass
    except KeylaneError as failure:
        log.debug("%s: history: %s", executor.group.partition_name, failure.message)
        return False
    state = executor.state
    return state.unlisted and not state.lost and executor.partition.address == address
