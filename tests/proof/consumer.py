"""A consumer under watch, a process of its own; run by the launcher.

python consumer.py META SUBJECT GROUP TTL_MS HANDLER_MS RECORD

SIGUSR1 has it stop itself, as by SIGSTOP, before the first line of its next handler.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from keylane import Consumer, Message
from keylane.checker.events import Event
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import Fate, KeylaneError
from keylane.rpc.environment import Environment
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.tls.settings import tls_of_environment
from proof.recording import Answered, Calling, Recorder, boot_ns
from support.observation import Telling, dropped, ended, started


class _RecordingNetwork(HttpNetwork):
    """Notes what the consumer tells the metaserver of its leases, at the moment of telling, and
    each answer.
    """

    def __init__(self, record: Recorder, group: str) -> None:
        super().__init__(tls_of_environment())
        self._record: Any = record
        self._group = group
        self._telling = Telling()
        self._calls = itertools.count()

    async def control(self, method: str, address: str, path: str, *rest: Any, **body: Any) -> Any:
        said = body.get("body")
        event: Event
        for event in self._telling.events(path, said):
            self._record(event)
        call = path.removeprefix("/v1/consumers/")
        if call not in {"join", "heartbeat", "release", "leave"}:
            return await super().control(method, address, path, *rest, **body)
        number = next(self._calls)
        place = (getattr(said, "partition_id", 0), getattr(said, "token", 0))
        holding = getattr(said, "holding", None)
        self._record(Calling(number, call, said.session, self._group, *place, holding))
        try:
            answer = await super().control(method, address, path, *rest, **body)
        except KeylaneError as error:
            if error.fate is Fate.NOT_DONE:
                self._record(Answered(number, type(error).__name__, 0, ()))
            raise
        told = answer.grants if call == "join" else answer
        grants = tuple(
            (int(grant.partition.partition_id), grant.token)
            for grant in getattr(told, "grants", ())
        )
        self._record(Answered(number, "", getattr(answer, "ttl_ms", 0), grants))
        return answer


READ_NS: ContextVar[int] = ContextVar("read_ns", default=0)
"""0: no look since the last handler."""


class _Looks(SystemClock):
    """The consumer's clock; what a worker's task read last is its look at the lease, when its
    handler begins.
    """

    def boot_ns(self) -> int:  # type: ignore[override]  # a callable there, a method here
        read_ns = boot_ns()
        READ_NS.set(read_ns)
        return read_ns


async def main() -> None:
    meta, subject, group, ttl_ms, handler_ms, path = sys.argv[1:]
    record = Recorder(Path(path))
    rng = random.Random(path)
    stop = asyncio.Event()
    freeze = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, freeze.set)

    async def handle(message: Message) -> None:
        if freeze.is_set():
            freeze.clear()
            os.kill(os.getpid(), signal.SIGSTOP)
        first_line_ns = boot_ns()
        look_ns = READ_NS.get() or first_line_ns
        READ_NS.set(0)
        look = started(message, group=group, clock_ns=look_ns, ours=True)
        record(look, at_ns=first_line_ns)
        try:
            await asyncio.sleep(2 * rng.random() * float(handler_ms) / 1000)
        except asyncio.CancelledError:
            record(dropped(message))
            raise
        record(ended(message, group=group))

    settings = ConsumerSettings(
        ttl_ms=int(ttl_ms),
        call_timeout_ms=1_000,
        pull_wait_ms=1_000,
        handover_ms=500,
        buffer_messages=500,
        handler_backoff=Backoff(first_ms=10, max_ms=100),
    )
    network = _RecordingNetwork(record, group)
    consumer = Consumer(
        meta.split(","),
        subject=subject,
        group=group,
        handler=handle,
        settings=settings,
        _environment=Environment(network=network, clock=_Looks()),
    )
    while True:
        try:
            await consumer.__aenter__()
            break
        except KeylaneError:  # the metaserver is away just now
            await asyncio.sleep(0.2)
    print("ready", flush=True)
    await stop.wait()
    await consumer.close()
    await network.close()


if __name__ == "__main__":
    asyncio.run(main())
