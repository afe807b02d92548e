"""Chooses the rows of a batch that have one of the requested order keys. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc


class KeyFilter:
    """Chooses rows by key, and the requested columns."""

    def __init__(self, keys: Iterable[bytes], columns: Sequence[str]) -> None:
        self._keys = pa.array(sorted(keys), pa.binary())
        self._columns = list(columns)
        self.columns_to_read = tuple(dict.fromkeys((*columns, "key")))
        """The columns that `rows` needs: the requested ones, and the key."""

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that have one of the keys, in their order."""
        chosen = pc.is_in(batch.column("key"), value_set=self._keys)
        return batch.filter(chosen).select(self._columns)
