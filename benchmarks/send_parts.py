"""What each part of `Producer.send` costs: the bare path's `send`, with one part more in each row.

Prints JSON: nanoseconds of processor time for a message, the least of `--rounds` rounds of 200,000.  Nothing is sent: full
batches are dropped, in each row alike.  The methods are written out, because a call between them would be measured too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

import msgspec
import xxhash
from machine import machine
from roles import KEYS, VALUE

COUNT = 200_000
BATCH_COUNT = 1_000
QUEUE_BYTES = 64 << 20


class Future(msgspec.Struct, frozen=True, gc=False):
    """What `send` returns: a batch and an index."""

    batch: object
    index: int


class Batch:
    """Columns of messages."""

    __slots__ = ("keys", "size", "times", "values")

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.times: list[int] = []
        self.size = 0


class Parts:
    """`send` methods, each with a part more than the one before."""

    def __init__(self) -> None:
        self.table = [Batch() for _ in range(4)] * 256
        self.senders = {"s": self}
        self.thread = get_ident()
        self.bytes = 0
        self.now_ns = time.time_ns

    def _add(self, batch: Batch) -> None:
        if len(batch.values) >= BATCH_COUNT:
            batch.__init__()  # type: ignore[misc]

    def bare(self, value: bytes, key: bytes) -> None:
        """Hash, append to the columns, read the clock."""
        batch = self.table[xxhash.xxh3_64_intdigest(key) & 1023]
        batch.keys.append(key)
        batch.values.append(value)
        batch.times.append(self.now_ns())
        batch.size += len(key) + len(value) + 20
        if len(batch.values) >= BATCH_COUNT:
            self._add(batch)

    def named(self, subject: str, value: bytes, *, key: bytes = b"", **_none: Any) -> None:
        """The subject, and the key by name."""
        batch = self.senders[subject].table[xxhash.xxh3_64_intdigest(key) & 1023]
        batch.keys.append(key)
        batch.values.append(value)
        batch.times.append(self.now_ns())
        batch.size += len(key) + len(value) + 20
        if len(batch.values) >= BATCH_COUNT:
            self._add(batch)

    def checked(self, subject: str, value: bytes, *, key: bytes = b"", **_none: Any) -> None:
        """The types, the size, the thread, the limit of the queue."""
        sender = self.senders[subject]
        if self.bytes >= QUEUE_BYTES or get_ident() != self.thread:
            raise RuntimeError
        if type(value) is not bytes or type(key) is not bytes:
            raise TypeError
        size = len(value) + len(key)
        if size > 1_024 and size > 1 << 20:
            raise ValueError
        batch = sender.table[xxhash.xxh3_64_intdigest(key) & 1023]
        batch.keys.append(key)
        batch.values.append(value)
        batch.times.append(self.now_ns())
        batch.size += size + 20
        if len(batch.values) >= BATCH_COUNT:
            self._add(batch)

    def awaitable(self, subject: str, value: bytes, *, key: bytes = b"", **_none: Any) -> Future:
        """A future for each message."""
        sender = self.senders[subject]
        if self.bytes >= QUEUE_BYTES or get_ident() != self.thread:
            raise RuntimeError
        if type(value) is not bytes or type(key) is not bytes:
            raise TypeError
        size = len(value) + len(key)
        if size > 1_024 and size > 1 << 20:
            raise ValueError
        batch = sender.table[xxhash.xxh3_64_intdigest(key) & 1023]
        index = len(batch.values)
        batch.keys.append(key)
        batch.values.append(value)
        batch.times.append(self.now_ns())
        batch.size += size + 20
        if index >= BATCH_COUNT:
            self._add(batch)
        return Future(batch, index)


def cost_ns(rounds: int, run: Callable[[], None]) -> float:
    """The least processor time for a message."""
    costs = []
    for _ in range(rounds):
        began = time.process_time_ns()
        run()
        costs.append((time.process_time_ns() - began) / COUNT)
    return round(min(costs), 1)


def main() -> None:
    """Measure each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    parts = Parts()
    keys = KEYS * (COUNT // len(KEYS))

    def loop() -> None:
        for _key in keys:
            pass

    def bare() -> None:
        send = parts.bare
        for key in keys:
            send(VALUE, key)

    def other(send: Callable[..., object]) -> Callable[[], None]:
        def run() -> None:
            for key in keys:
                send("s", VALUE, key=key)

        return run

    figures = {
        "loop_ns": cost_ns(rounds, loop),
        "bare_ns": cost_ns(rounds, bare),
        "named_ns": cost_ns(rounds, other(parts.named)),
        "checked_ns": cost_ns(rounds, other(parts.checked)),
        "awaitable_ns": cost_ns(rounds, other(parts.awaitable)),
    }
    print(json.dumps({"machine": machine(), "rounds": rounds, **figures}, indent=2))


if __name__ == "__main__":
    main()
