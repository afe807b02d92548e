"""Judges what the clients of a soak have written down: what was lost, and what was out of order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

Message = tuple[str, int]
"""The key, and the number of a message; those of a key rise."""


class Verdict(NamedTuple):
    acked: int
    handled: int
    """Messages, each counted once."""
    handled_again: int
    lost: list[Message]
    out_of_order: list[Message]
    """First handled after a later one of their key."""


def judge(acked: Iterable[Message], handled: Iterable[tuple[int, str, int]]) -> Verdict:
    """
    Compare what was acked with what one consumer group has handled.

    Args:
        handled: the instant, the key and the number, in any order.
    """
    wanted = set(acked)
    seen: set[Message] = set()
    last: dict[str, int] = defaultdict(lambda: -1)
    again = 0
    inverted = []
    for _, key, number in sorted(handled):
        if (key, number) in seen:
            again += 1
            continue
        seen.add((key, number))
        if number < last[key]:
            inverted.append((key, number))
        last[key] = max(last[key], number)
    return Verdict(len(wanted), len(seen), again, sorted(wanted - seen), inverted)


def read_acked(paths: Iterable[Path]) -> Iterator[Message]:
    for path in paths:
        for line in path.read_text().splitlines():
            key, number = line.split(" ")
            yield key, int(number)


def read_handled(paths: Iterable[Path]) -> Iterator[tuple[int, str, int]]:
    for path in paths:
        for line in path.read_text().splitlines():
            at_ns, key, number = line.split(" ")
            yield int(at_ns), key, int(number)
