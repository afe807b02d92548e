"""A query of Spark without Spark: what it does with the reader of a stream."""

from __future__ import annotations

import json
import pickle
from typing import Any

from keylane.spark.streaming.reader import KeylaneStreamReader


class Query:
    """What Spark does with a reader: batches one after another, with the texts of their offsets."""

    def __init__(self, reader: KeylaneStreamReader, checkpoint: list[dict] | None = None) -> None:
        self.reader = reader
        self.checkpoint = checkpoint if checkpoint is not None else []
        self.batches: list[list[tuple[int, int, bytes, int]]] = []
        """Of each batch the partition, offset, key and number of each row."""

    def start(self) -> dict[str, Any]:
        return self.checkpoint[-1] if self.checkpoint else self.reader.initialOffset()

    def construct(self, limit: object = None) -> bool:
        """Construct the next batch, as it is before Spark runs it; False: there is none."""
        start = self.start()
        end = self.reader.latestOffset(start, limit or self.reader.getDefaultReadLimit())
        if self.checkpoint and json.dumps(end) == json.dumps(start):
            return False
        self.checkpoint.append(json.loads(json.dumps(end)))
        return True

    def run(self) -> None:
        """Run the last batch that was constructed."""
        before = self.checkpoint[-2] if len(self.checkpoint) > 1 else self.reader.initialOffset()
        rows = []
        for part in self.reader.partitions(before, self.checkpoint[-1]):
            worker = pickle.loads(pickle.dumps(self.reader))
            for batch in worker.read(pickle.loads(pickle.dumps(part))):
                rows += [
                    (row["partition"], row["offset"], row["key"], int(row["value"]))
                    for row in batch.to_pylist()
                ]
        self.batches.append(rows)

    def all(self, limit: object = None) -> None:
        """Every batch until there is nothing new."""
        while self.construct(limit):
            self.run()

    @property
    def rows(self) -> list[tuple[int, int, bytes, int]]:
        return [row for batch in self.batches for row in batch]

    def check(self, sent: range) -> None:
        """Every message once, and those of each key in the order they were sent."""
        assert sorted(row[3] for row in self.rows) == list(sent)
        for key in {row[2] for row in self.rows}:
            numbers = [row[3] for row in self.rows if row[2] == key]
            assert numbers == sorted(numbers)
