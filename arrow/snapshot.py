"""Asks a metaserver and the brokers once what there is to read. Network only.

    metaserver: routes ──▶ brokers: bounds, one call each, at the same time ──▶ plan_ranges

If a metaserver or a broker is unreachable, the calls are repeated for a while, so that a restart
does not fail a plan.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import product

from ..protocol import endpoints
from ..protocol.backoff import Backoff
from ..protocol.errors import KeylaneError, RetryRule, SubjectUnknownError, UnreachableError
from ..protocol.reading.bounds import BOUNDS_AT_ONCE_MAX, AskBounds, BoundsList, PartitionBounds
from ..protocol.routing import PartitionState, Route
from ..protocol.text import listed
from ..rpc.client import BrokerClient, MetaClient
from ..rpc.network import Network
from .opening import open_network
from .planner import (
    PlannedRange,
    SelectedPartition,
    check_batch,
    check_named,
    plan_ranges,
    question_of,
    select_partitions,
)
from .selection import ReadOptions

META_RETRY_S = 10.0
"""Seconds for which an unreachable metaserver is retried: a restart takes less, and a wrong address
is reported soon.
"""
_BACKOFF = Backoff()


def take_snapshot(options: ReadOptions) -> list[PlannedRange]:
    """
    Return the ranges to read, one for each physical partition, with their present ends.

    This blocks, and needs a thread without an event loop.

    Raises:
        RefusedError: the subject, a partition, a group or an offset does not exist, or rows are
            lost.
        UnreachableError: the metaserver or a broker did not answer within the time of the options.
    """
    return asyncio.run(_ask(options))


def has_expired(options: ReadOptions, partition_id: int) -> bool:
    """
    Return True if a subject of the options once had this partition, and it has expired; False also
    if the metaserver does not answer.

    This blocks, and needs a thread without an event loop.
    """
    try:
        return asyncio.run(_has_expired(options, partition_id))
    except KeylaneError:
        return False


async def _has_expired(options: ReadOptions, partition_id: int) -> bool:
    network = open_network(options.secured)
    try:
        meta = MetaClient(network, options.meta)
        histories = await asyncio.gather(
            *(meta.call(endpoints.HISTORY, subject=each) for each in options.subjects)
        )
    finally:
        await network.close()
    return any(
        past.partition.partition_id == partition_id
        and past.partition.state is PartitionState.EXPIRED
        for history in histories
        for past in history.partitions
    )


async def _ask(options: ReadOptions) -> list[PlannedRange]:
    network = open_network(options.secured)
    try:
        return await ask_cluster(network, options)
    finally:
        await network.close()


async def ask_cluster(network: Network, options: ReadOptions) -> list[PlannedRange]:
    """Return the ranges to read, as `take_snapshot` does, over a given network."""
    check_batch(options)
    meta = MetaClient(network, options.meta)
    patience = _Patience(options.retry_s)
    while True:
        routes = await _routes(meta, options)
        # The metaserver knows all partitions: waiting makes no more of them.
        check_named(routes, options)
        try:
            selected = select_partitions(routes, options)
            answers = await _answers(network, selected, options)
        except KeylaneError as error:
            await patience.wait_or_raise(error)
        else:
            return plan_ranges(selected, answers, options)


class _Patience:
    """A time limit for retries after errors that may pass."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + seconds
        self._pauses = _BACKOFF.pauses(random.Random())

    async def wait_or_raise(self, error: KeylaneError) -> None:
        """Pause before the next try; raise the error if a retry cannot help or the time is over."""
        pause_s = self._pauses.next_ms() / 1000
        if error.retry is RetryRule.NEVER or self._loop.time() + pause_s > self._until:
            raise error
        await asyncio.sleep(pause_s)


async def _routes(meta: MetaClient, options: ReadOptions) -> list[Route]:
    patience = _Patience(min(META_RETRY_S, options.retry_s))
    while True:
        try:
            routes = await asyncio.gather(*map(meta.route, options.subjects))
            for subject, group in product(options.subjects, options.groups()):
                await meta.call(
                    endpoints.GROUP_SETTINGS, subject=subject, group=group
                )  # GroupUnknownError
            return list(routes)
        except SubjectUnknownError as error:
            raise await _with_suggestion(meta, error) from None
        except UnreachableError as error:
            await patience.wait_or_raise(
                error.copy(
                    message=f"meta: no metaserver answers at {', '.join(options.meta)}: "
                    f"{error.message}"
                )
            )


async def _with_suggestion(meta: MetaClient, error: SubjectUnknownError) -> SubjectUnknownError:
    """Return the error with the name of a subject that is spelt nearly like the requested one."""
    name = error.subject or ""
    try:
        known = [each.subject for each in (await meta.call(endpoints.SUBJECTS)).subjects]
    except KeylaneError:
        return error
    near = get_close_matches(name, known, n=1)
    advice = f"; did you mean {near[0]}?" if near else ""
    return SubjectUnknownError(f"subject: there is no subject {name}{advice}", **error.details)


async def _answers(
    network: Network, selected: Sequence[SelectedPartition], options: ReadOptions
) -> dict[int, PartitionBounds]:
    """Return the bounds by partition id, of the partitions that brokers have."""
    by_address: dict[str, list[SelectedPartition]] = defaultdict(list)
    for each in selected:
        by_address[str(each.partition.address)].append(each)
    calls = [
        _ask_broker(network, address, asked[first : first + BOUNDS_AT_ONCE_MAX], options)
        for address, asked in by_address.items()
        for first in range(0, len(asked), BOUNDS_AT_ONCE_MAX)
    ]
    return {
        answer.partition_id: answer
        for answers in await asyncio.gather(*calls)
        for answer in answers.partitions
    }


async def _ask_broker(
    network: Network, address: str, asked: Sequence[SelectedPartition], options: ReadOptions
) -> BoundsList:
    body = AskBounds(partitions=[question_of(each.partition, options) for each in asked])
    try:
        return await BrokerClient(network, address).control(endpoints.PARTITION_BOUNDS, body)
    except UnreachableError as error:
        group = asked[0].partition.broker_group
        ids = [str(each.partition.partition_id) for each in asked]
        text = (
            f"broker group {group} does not answer, which has partition {listed(ids)}; "
            "with the option `partitions` others can be read without it"
        )
        raise error.copy(message=f"{text}: {error.message}") from error
