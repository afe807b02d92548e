"""Plans a read from a snapshot of the cluster: the routes from a metaserver and the bounds from the
brokers. Performs network I/O.

    metaserver: routes ──▶ brokers: bounds, one concurrent call each ──▶ plan_ranges

Calls to an unreachable metaserver or broker are retried for some time, so that a restart does not
make planning fail.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from itertools import product

from ..protocol import endpoints
from ..protocol.backoff import Backoff
from ..protocol.errors import KeylaneError, RetryRule, SubjectUnknownError, UnreachableError
from ..protocol.operations import SubjectHistory
from ..protocol.reading.bounds import BOUNDS_AT_ONCE_MAX, AskBounds, BoundsList, PartitionBounds
from ..protocol.routing import PartitionState, Route
from ..protocol.text import listed
from ..rpc.client import BrokerClient, MetaClient
from ..rpc.network import Network
from .opening import run_with_network
from .planner import (
    PlannedRange,
    SelectedPartition,
    bounds_request,
    check_batch,
    check_named_partitions,
    plan_ranges,
    select_partitions,
)
from .selection import ReadOptions

META_RETRY_S = 10.0
"""The time in seconds for which unreachable metaservers are retried: longer than a restart, but
short enough to report a wrong address soon.
"""
_BACKOFF = Backoff()


def take_snapshot(options: ReadOptions) -> list[PlannedRange]:
    """
    Return the ranges to read, one per physical partition, with their ends fixed as of now.

    This blocks, and needs a thread without an event loop.

    Raises:
        RefusedError: the subject, a partition, a group or an offset does not exist, or rows are
            lost.
        UnreachableError: no metaserver responded, or a broker did not respond within
            `options.retry_s`.
    """
    return run_with_network(partial(take_snapshot_over, options=options), options.security)


def has_expired(options: ReadOptions, partition_id: int) -> bool:
    """
    Return True if this partition belonged to a subject of the options and has expired. Return False
    if no metaserver responds.

    This blocks, and needs a thread without an event loop.
    """
    try:
        histories = run_with_network(partial(_fetch_histories, options=options), options.security)
    except KeylaneError:
        return False
    return any(
        entry.partition.partition_id == partition_id
        and entry.partition.state is PartitionState.EXPIRED
        for history in histories
        for entry in history.partitions
    )


async def _fetch_histories(network: Network, options: ReadOptions) -> list[SubjectHistory]:
    meta = MetaClient(network, options.meta)
    return await asyncio.gather(
        *(meta.call(endpoints.HISTORY, subject=each) for each in options.subjects)
    )


async def take_snapshot_over(network: Network, options: ReadOptions) -> list[PlannedRange]:
    """Return the ranges to read, like `take_snapshot`, over an already open network."""
    check_batch(options)
    meta = MetaClient(network, options.meta)
    retry_budget = _RetryBudget(options.retry_s)
    while True:
        routes = await _fetch_routes(meta, options)
        # Not retried, because the metaserver already knows all partitions.
        check_named_partitions(routes, options)
        try:
            selected = select_partitions(routes, options)
            answers = await _fetch_bounds(network, selected, options)
        except KeylaneError as error:
            await retry_budget.wait_or_raise(error)
        else:
            return plan_ranges(selected, answers, options)


class _RetryBudget:
    """Limits the total time that is spent on retries after temporary errors."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = self._loop.time() + seconds
        self._pauses = _BACKOFF.pauses(random.Random())

    async def wait_or_raise(self, error: KeylaneError) -> None:
        """Pause before the next attempt. Raises the error instead if a retry cannot help, or the
        time is used up.
        """
        pause_s = self._pauses.next_pause_ms() / 1000
        if error.retry is RetryRule.NEVER or self._loop.time() + pause_s > self._deadline_s:
            raise error
        await asyncio.sleep(pause_s)


async def _fetch_routes(meta: MetaClient, options: ReadOptions) -> list[Route]:
    retry_budget = _RetryBudget(min(META_RETRY_S, options.retry_s))
    while True:
        try:
            routes = await asyncio.gather(*map(meta.route, options.subjects))
            for subject, group in product(options.subjects, options.groups()):
                # Raises GroupUnknownError.
                await meta.call(endpoints.GROUP_SETTINGS, subject=subject, group=group)
            return list(routes)
        except SubjectUnknownError as error:
            raise await _with_suggestion(meta, error) from None
        except UnreachableError as error:
            await retry_budget.wait_or_raise(
                error.copy(
                    message=f"meta: no metaserver answers at {', '.join(options.meta)}: "
                    f"{error.message}"
                )
            )


async def _with_suggestion(meta: MetaClient, error: SubjectUnknownError) -> SubjectUnknownError:
    """Return the error, with a similarly spelled subject name as a suggestion if there is one."""
    name = error.subject or ""
    try:
        known_names = [each.subject for each in (await meta.call(endpoints.SUBJECTS)).subjects]
    except KeylaneError:
        return error
    matches = get_close_matches(name, known_names, n=1)
    advice = f"; did you mean {matches[0]}?" if matches else ""
    return SubjectUnknownError(f"subject: there is no subject {name}{advice}", **error.details)


async def _fetch_bounds(
    network: Network, selected: Sequence[SelectedPartition], options: ReadOptions
) -> dict[int, PartitionBounds]:
    """Return the bounds of the selected partitions that brokers know, by partition id."""
    by_address: dict[str, list[SelectedPartition]] = defaultdict(list)
    for each in selected:
        by_address[str(each.partition.address)].append(each)
    calls = [
        _fetch_from_broker(network, address, hosted[first : first + BOUNDS_AT_ONCE_MAX], options)
        for address, hosted in by_address.items()
        for first in range(0, len(hosted), BOUNDS_AT_ONCE_MAX)
    ]
    return {
        bounds.partition_id: bounds
        for reply in await asyncio.gather(*calls)
        for bounds in reply.partitions
    }


async def _fetch_from_broker(
    network: Network, address: str, hosted: Sequence[SelectedPartition], options: ReadOptions
) -> BoundsList:
    body = AskBounds(partitions=[bounds_request(each.partition, options) for each in hosted])
    try:
        return await BrokerClient(network, address).control(endpoints.PARTITION_BOUNDS, body)
    except UnreachableError as error:
        group = hosted[0].partition.broker_group
        ids = [str(each.partition.partition_id) for each in hosted]
        text = (
            f"broker group {group} does not answer, which has partition {listed(ids)}; "
            "with the option `partitions` others can be read without it"
        )
        raise error.copy(message=f"{text}: {error.message}") from error
