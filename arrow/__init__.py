"""Batches of brokers as Arrow columns, and readers of ranges of subjects; it needs pyarrow and
numpy.

keylane.arrow.read(meta, subject)   the messages of a subject as a pyarrow.RecordBatchReader; see `reading.py`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .reading import read

__all__ = ["read"]


def __getattr__(name: str) -> object:
    # Not before it is asked for: producers use modules of this package where pyarrow is not
    # installed.
    if name == "read":
        from .reading import read

        return read
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
