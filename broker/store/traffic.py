"""Counts what a broker stores and hands out, by subject, since its start.  Pure."""

from __future__ import annotations

from ...rpc.operating.histogram import Histogram

SUBJECTS_MAX = 10_000
"""Subjects that are counted apart; what further ones send and get counts under OTHER."""
OTHER = "(other)"


class Flow:
    """Messages and bytes that went one way."""

    __slots__ = ("batches", "bytes", "messages")

    def __init__(self) -> None:
        self.batches = 0
        self.messages = 0
        self.bytes = 0


class Traffic:
    """The counts of a broker."""

    def __init__(self) -> None:
        self.stored: dict[str, Flow] = {}
        """Subject → what became durable."""
        self.handed: dict[str, Flow] = {}
        """Subject → what answers of pulls and reads held."""
        self.appends = Histogram()
        """From the arrival of an append to its ack, the wait for room included."""
        self.commits = Histogram()
        """Write and sync of a commit."""
        self.fences = 0
        """Fences that were raised: partitions that got a new owner, or had a reset."""

    def note_stored(self, subject: str, *, messages: int, size_bytes: int) -> None:
        """Count a durable batch."""
        flow = self.stored.get(subject) or _added(self.stored, subject)
        flow.batches += 1
        flow.messages += messages
        flow.bytes += size_bytes

    def note_handed(self, subject: str, *, messages: int, size_bytes: int) -> None:
        """Count an answer with messages."""
        flow = self.handed.get(subject) or _added(self.handed, subject)
        flow.batches += 1
        flow.messages += messages
        flow.bytes += size_bytes


def _added(flows: dict[str, Flow], subject: str) -> Flow:
    return flows.setdefault(subject if len(flows) < SUBJECTS_MAX else OTHER, Flow())
