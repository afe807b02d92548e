"""Converts brokers' batches to Arrow columns, and reads ranges of subjects. Requires pyarrow and
numpy.

keylane.arrow.read(meta, subject)    returns a subject's messages as a
                                     pyarrow.RecordBatchReader; see `reading.py`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..protocol.errors import MissingExtraError

if TYPE_CHECKING:
    from .reading import read

__all__ = ["read"]


def __getattr__(name: str) -> object:
    # Imported on first use, because producers import modules of this package even if pyarrow is not
    # installed.
    if name == "read":
        try:
            from .reading import read
        except ModuleNotFoundError as error:
            raise MissingExtraError.of(error, "keylane.arrow", "arrow") from error
        return read
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
