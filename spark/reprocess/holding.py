"""Holds the messages that a job still needs, in a thread of its own, until the job has ended.

    begin: [start, …) of every range ─▶ renewed every third of the ttl ─▶ end: from the end of every
        range on, once

A partition that is opened meanwhile is held from its first message, so that a group can go on
behind the backfill.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from ...protocol import endpoints
from ...protocol.errors import KeylaneError, OffsetOutOfRangeError
from ...protocol.reprocess.holds import SetHold
from ...rpc.client import BrokerClient, MetaClient
from ...rpc.http_network import client_network

log = logging.getLogger("keylane.spark")
TTL_MS = 600_000
"""How long what a killed job holds stays."""


class Holding:
    """The holds of one job on one subject; use it in a `with` block, which begins them and lets
    them go.
    """

    def __init__(
        self,
        meta: tuple[str, ...],
        subject: str,
        job: str,
        *,
        starts: Mapping[int, int],
        ends: Mapping[int, int],
        handover_ms: int,
        ttl_ms: int = TTL_MS,
    ) -> None:
        """
        Args:
            starts: partition id → the first offset that the job needs.
            ends: partition id → where live reading goes on.
            handover_ms: how long what is behind the ends is held after the job, for a group to
                begin there; 0: not at all.
        """
        self._meta, self._subject, self._job = meta, subject, job
        self._starts, self._ends = dict(starts), dict(ends)
        self._handover_ms, self._ttl_ms = handover_ms, ttl_ms
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="keylane holds", daemon=True)

    def __enter__(self) -> Self:
        asyncio.run(self._hold(self._starts, self._ttl_ms))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if kind is not None:
            return  # the same command goes on within the ttl
        try:
            asyncio.run(self._hold(self._ends, self._handover_ms))
        except KeylaneError as error:
            log.warning(
                "cannot end the holds of job %s, which will expire by themselves: %s",
                self._job,
                error,
            )

    def _renew(self) -> None:
        while not self._ended.wait(self._ttl_ms / 3000):
            try:
                asyncio.run(self._hold(self._starts, self._ttl_ms))
            except KeylaneError as error:
                log.warning("cannot renew the holds of job %s: %s", self._job, error)

    async def _hold(self, offsets: Mapping[int, int], ttl_ms: int) -> None:
        """
        Set every hold.

        Raises:
            OffsetOutOfRangeError: messages that the job needs are gone.
            UnreachableError
        """
        network = client_network()
        try:
            route = await MetaClient(network, self._meta).route(self._subject)
            newest = max(self._starts, default=0)
            for partition in route.partitions:
                partition_id = int(partition.partition_id)
                if partition.address is None or (
                    partition_id not in offsets and partition_id < newest
                ):
                    continue
                broker = BrokerClient(network, partition.address)
                body = SetHold(
                    job=self._job, from_offset=offsets.get(partition_id, 0), ttl_ms=ttl_ms
                )
                try:
                    await broker.control(endpoints.HOLD, body, id=partition_id)
                except OffsetOutOfRangeError as error:
                    if partition_id in offsets:
                        raise
                    log.warning(
                        "cannot hold the messages of partition %d against retention: %s",
                        partition_id,
                        error.message,
                    )
                finally:
                    await broker.close()
        finally:
            await network.close()
