"""Asks the metaserver whether a batch that may be stored is lost with its broker."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from ...protocol.errors import KeylaneError, SubjectUnknownError
from ...protocol.routing import Partition
from ..executor_state import ExecutorState, MessageGroup
from ..failure import NOT_HERE

log = logging.getLogger("keylane.producer")


class InDoubtExecutor(Protocol):
    """An executor whose oldest batch is doubtful."""

    group: MessageGroup
    partition: Partition
    state: ExecutorState


async def is_hopeless(
    executor: InDoubtExecutor,
    error: KeylaneError,
    ask_history: Callable[[], Awaitable[Collection[str]]],
) -> bool:
    """
    Return True if no broker knows whether the oldest batch is stored, and the loss is not accepted.

    A broker without the partition may have replaced a lost broker, or may have the address of a
    broker that moved. The metaserver knows which. It is asked after the refusal, because an
    earlier answer may be out of date.

    Args:
        error: the refusal.
        ask_history: see `ExecutorOwner.ask_history`; it changes `executor`.
    """
    state, address = executor.state, executor.partition.address
    if state.lost or not (state.gone and isinstance(error, NOT_HERE)):
        return False
    try:
        if executor.partition.broker_group in await ask_history():
            return False
    except SubjectUnknownError:
        pass
    except KeylaneError as silent:
        log.debug("%s: history: %s", executor.group.partition_name, silent.message)
        return False
    state = executor.state
    return state.gone and not state.lost and executor.partition.address == address
