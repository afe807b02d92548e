"""Checks that sequences in the log have no gaps, and that versions of routes only rise. Pure."""

from __future__ import annotations

from .findings import Findings


class Sequences:
    """The batches of each producer on each partition, in the order of the log."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._next: dict[tuple[int, int], tuple[int, int]] = {}
        """Epoch and next sequence, by (partition, producer)."""
        self._first: dict[int, int] = {}
        """First offset in the log of each partition, because retention may have removed earlier
        ones.
        """

    def batched(
        self,
        partition_id: int,
        offset: int,
        count: int,
        producer_id: int,
        epoch: int,
        sequence: int,
    ) -> None:
        """See `events.Batched`."""
        known = self._next.get((partition_id, producer_id))
        where = f"{partition_id}/{offset}: epoch {epoch}, sequence {sequence} of {producer_id}"
        if known is not None and epoch < known[0]:
            self._findings.note("stale effect", f"{where}, after epoch {known[0]}")
            return
        expected = known[1] if known is not None and epoch == known[0] else 0
        whole = self._first.setdefault(partition_id, offset) == 0
        if sequence < expected:
            self._findings.note("duplicate", f"{where}, where {expected} is the next")
        elif sequence > expected and (known is not None or whole):
            self._findings.note("skip", f"{where}, where {expected} is the next")
        self._next[partition_id, producer_id] = (epoch, sequence + count)


class Routes:
    """The routes that producers followed, in the order of time."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._open: dict[int, tuple[int, ...]] = {}
        self._newest: dict[str, int] = {}

    def routed(self, producer: str, version: int, partition_ids: tuple[int, ...]) -> None:
        """See `events.Routed`."""
        newest = self._newest.get(producer, version)
        if version < newest:
            self._findings.note(
                "nonmonotonic", f"{producer} follows route {version} after route {newest}"
            )
        self._newest[producer] = max(version, newest)
        known = self._open.setdefault(version, partition_ids)
        if known != partition_ids:
            self._findings.note(
                "nonmonotonic", f"route {version} leads to {known} and to {partition_ids}"
            )
