"""What each part of `Producer.send` costs: the bare path's `send`, with one part more in each row.

Prints JSON: nanoseconds of processor time for a message, the least of `--rounds` rounds of 200,000.
Nothing is sent: full batches are dropped, in each row alike. The methods are written out, because
a call between them would be measured too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from threading import get_ident

import msgspec
import xxhash
from machine import machine
from roles import KEYS, VALUE

COUNT = 200_000
BATCH_COUNT = 1_000
OPTIONS_UNUSED = "options are for the real producer"


class Future(msgspec.Struct, frozen=True, gc=False):
    """What `send` returns: a batch and an index."""

    batch: object
    index: int


class Batch:
    """Columns of messages."""

    __slots__ = ("keys", "sent_at_ns", "size", "times", "values")

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.times: list[int] = []
        self.sent_at_ns = 0
        self.size = 0


class Parts:
    """`send` methods, each with a part more than the one before."""

    def __init__(self) -> None:
        self.table = [Batch() for _ in range(4)] * 256
        self.senders = {"s": self}
        self.thread = get_ident()
        self.full = False
        self.turn_ns = 0
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

    def timed(self, value: bytes, key: bytes) -> None:
        """Read the time once per loop iteration instead of once per message."""
        batch = self.table[xxhash.xxh3_64_intdigest(key) & 1023]
        if batch.sent_at_ns is not self.turn_ns:
            batch.times.append(self.now_ns())
        batch.keys.append(key)
        batch.values.append(value)
        batch.size += len(key) + len(value) + 20
        if len(batch.values) >= BATCH_COUNT:
            self._add(batch)

    def named(  # noqa: PLR0917 - those of `Producer.send`
        self,
        subject: str,
        value: bytes,
        unnamed: None = None,
        key: bytes = b"",
        at: None = None,
        properties: None = None,
        tags: tuple[()] = (),
        queue: None = None,
        timeout: None = None,
    ) -> None:
        """Also take the subject, the key by name, and unused options."""
        sender = self.senders[subject]
        if properties or tags or not (unnamed is at is queue is timeout is None):
            raise ValueError(OPTIONS_UNUSED)
        batch = sender.table[xxhash.xxh3_64_intdigest(key) & 1023]
        if batch.sent_at_ns is not self.turn_ns:
            batch.times.append(self.now_ns())
        batch.keys.append(key)
        batch.values.append(value)
        batch.size += len(key) + len(value) + 20
        if len(batch.values) >= BATCH_COUNT:
            self._add(batch)

    def checked(  # noqa: PLR0917 - those of `Producer.send`
        self,
        subject: str,
        value: bytes,
        unnamed: None = None,
        key: bytes = b"",
        at: None = None,
        properties: None = None,
        tags: tuple[()] = (),
        queue: None = None,
        timeout: None = None,
    ) -> None:
        """Also check the types, the size, the thread and the queue limit."""
        sender = self.senders[subject]
        if properties or tags or not (unnamed is at is queue is timeout is None):
            raise ValueError(OPTIONS_UNUSED)
        if self.full or get_ident() != self.thread:
            raise RuntimeError("the queue is full, or another thread sends")
        if type(value) is not bytes or type(key) is not bytes:
            raise TypeError("key and value are bytes")
        size = len(value) + len(key)
        if size > 1_024 and size > 1 << 20:
            raise ValueError("a message has 1 MiB at most")
        batch = sender.table[xxhash.xxh3_64_intdigest(key) & 1023]
        if batch.sent_at_ns is not self.turn_ns:
            batch.times.append(self.now_ns())
        batch.keys.append(key)
        batch.values.append(value)
        batch.size += size + 20
        if len(batch.values) >= BATCH_COUNT:
            self._add(batch)

    def awaitable(  # noqa: PLR0917 - those of `Producer.send`
        self,
        subject: str,
        value: bytes,
        unnamed: None = None,
        key: bytes = b"",
        at: None = None,
        properties: None = None,
        tags: tuple[()] = (),
        queue: None = None,
        timeout: None = None,
    ) -> Future:
        """Also create a future for each message."""
        sender = self.senders[subject]
        if properties or tags or not (unnamed is at is queue is timeout is None):
            raise ValueError(OPTIONS_UNUSED)
        if self.full or get_ident() != self.thread:
            raise RuntimeError("the queue is full, or another thread sends")
        if type(value) is not bytes or type(key) is not bytes:
            raise TypeError("key and value are bytes")
        size = len(value) + len(key)
        if size > 1_024 and size > 1 << 20:
            raise ValueError("a message has 1 MiB at most")
        batch = sender.table[xxhash.xxh3_64_intdigest(key) & 1023]
        if batch.sent_at_ns is not self.turn_ns:
            batch.times.append(self.now_ns())
        index = len(batch.values)
        batch.keys.append(key)
        batch.values.append(value)
        batch.size += size + 20
        if index >= BATCH_COUNT:
            self._add(batch)
        return Future(batch, index)


def cost_ns(rounds: int, run: Callable[[], None]) -> float:
    """Return the minimum processor time per message."""
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

    def plain(send: Callable[[bytes, bytes], None]) -> Callable[[], None]:
        def run() -> None:
            for key in keys:
                send(VALUE, key)

        return run

    def other(send: Callable[..., object]) -> Callable[[], None]:
        def run() -> None:
            for key in keys:
                send("s", VALUE, key=key)

        return run

    figures = {
        "loop_ns": cost_ns(rounds, loop),
        "bare_ns": cost_ns(rounds, plain(parts.bare)),
        "timed_ns": cost_ns(rounds, plain(parts.timed)),
        "named_ns": cost_ns(rounds, other(parts.named)),
        "checked_ns": cost_ns(rounds, other(parts.checked)),
        "awaitable_ns": cost_ns(rounds, other(parts.awaitable)),
    }
    print(json.dumps({"machine": machine(), "rounds": rounds, **figures}, indent=2))


if __name__ == "__main__":
    main()
