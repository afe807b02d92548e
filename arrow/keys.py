"""Which rows of a batch have one of the order keys that were asked for.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc


class KeyFilter:
    """Chooses rows by key, and the columns that were asked for."""

    def __init__(self, keys: Iterable[bytes], columns: Sequence[str]) -> None:
        self._keys = pa.array(sorted(keys), pa.binary())
        self._columns = list(columns)
        self.columns_to_read = tuple(dict.fromkeys((*columns, "key")))
        """What `rows` needs: the columns asked for, and the key."""

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of the keys, in their order."""
        chosen = pc.is_in(batch.column("key"), value_set=self._keys)
        return batch.filter(chosen).select(self._columns)
