"""Protects the messages that a job still needs from retention until the job has ended.

    begin: hold [start, …) of every range ─▶ renew every third of the ttl
                                          ─▶ end: hold [end, …) of every range, once

A separate thread renews the holds. Partitions that open during the job are held from their first
message, so that a group can continue after the backfill.
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
"""The time in milliseconds after which the holds of a killed job expire."""


class RetentionHold:
    """Protects the messages that a job needs from retention while its `with` block runs."""

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
            starts: the first offset that the job needs, by partition id.
            ends: the offset at which reading continues after the backfill, by partition id.
            handover_ms: the time in milliseconds that messages after `ends` stay held when the job
                has ended, so that a group can start there; 0 holds none.
            ttl_ms: the time in milliseconds after which a hold expires unless it is renewed.
        """
        self._meta = meta
        self._subject = subject
        self._job = job
        self._starts = dict(starts)
        self._ends = dict(ends)
        self._handover_ms = handover_ms
        self._ttl_ms = ttl_ms
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._renew_until_stopped, name="keylane holds", daemon=True
        )

    def __enter__(self) -> Self:
        asyncio.run(self._set_holds(self._starts, self._ttl_ms))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()
        if kind is not None:
            return  # the same command can continue the job until the holds expire
        try:
            asyncio.run(self._set_holds(self._ends, self._handover_ms))
        except KeylaneError as error:
            log.warning(
                "cannot release the holds of job %s, which will expire: %s",
                self._job,
                error,
            )

    def _renew_until_stopped(self) -> None:
        while not self._stopped.wait(self._ttl_ms / 3000):
            try:
                asyncio.run(self._set_holds(self._starts, self._ttl_ms))
            except KeylaneError as error:
                log.warning("cannot renew the holds of job %s: %s", self._job, error)

    async def _set_holds(self, offsets: Mapping[int, int], ttl_ms: int) -> None:
        """
        Set the hold on each partition.

        Raises:
            OffsetOutOfRangeError: messages that the job needs have been removed.
            UnreachableError: a broker or the metaserver does not respond.
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
