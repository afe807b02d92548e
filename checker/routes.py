"""Checks that sequences in the log have no gaps, and that versions of routes only rise. Pure."""

from __future__ import annotations

from .findings import Findings


class Sequences:
    """Checks each producer's sequences on each partition, in the order of the log."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._expected_sequences: dict[tuple[int, int], tuple[int, int]] = {}
        """Maps (partition, producer) to the epoch and the next sequence."""
        self._first_offsets: dict[int, int] = {}
        """The first offset of each partition in the log. Retention may have removed earlier
        messages.
        """

    def on_batched(
        self,
        partition_id: int,
        offset: int,
        count: int,
        producer_id: int,
        epoch: int,
        sequence: int,
    ) -> None:
        """See `events.Batched`."""
        previous = self._expected_sequences.get((partition_id, producer_id))
        description = (
            f"{partition_id}/{offset}: epoch {epoch}, sequence {sequence} of {producer_id}"
        )
        if previous is not None and epoch < previous[0]:
            self._findings.note("stale effect", f"{description}, after epoch {previous[0]}")
            return
        expected_sequence = previous[1] if previous is not None and epoch == previous[0] else 0
        is_complete = self._first_offsets.setdefault(partition_id, offset) == 0
        if sequence < expected_sequence:
            self._findings.note(
                "duplicate", f"{description}, expected sequence {expected_sequence}"
            )
        elif sequence > expected_sequence and (previous is not None or is_complete):
            self._findings.note("skip", f"{description}, expected sequence {expected_sequence}")
        self._expected_sequences[partition_id, producer_id] = (epoch, sequence + count)


class Routes:
    """Checks the routes that producers used, in chronological order."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._open_partitions: dict[int, tuple[int, ...]] = {}
        self._newest_routes: dict[str, int] = {}

    def on_routed(self, producer: str, version: int, partition_ids: tuple[int, ...]) -> None:
        """See `events.Routed`."""
        newest = self._newest_routes.get(producer, version)
        if version < newest:
            self._findings.note(
                "nonmonotonic", f"{producer} follows route {version} after route {newest}"
            )
        self._newest_routes[producer] = max(version, newest)
        first_seen = self._open_partitions.setdefault(version, partition_ids)
        if first_seen != partition_ids:
            self._findings.note(
                "nonmonotonic", f"route {version} has partitions {first_seen}, and {partition_ids}"
            )
