"""Imports the classes for read limits and Trigger.AvailableNow from PySpark 4.2, or defines
stand-ins.

Older versions request the latest offset without passing the start of the batch, and run
Trigger.AvailableNow as one batch.
"""

from __future__ import annotations

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # PySpark 4.0 and 4.1
    HAS_READ_LIMITS = False

    class ReadLimit:  # type: ignore[no-redef]
        """A stand-in for the class of PySpark 4.2."""

    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """A stand-in for the class of PySpark 4.2."""

    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        """A stand-in for the class of PySpark 4.2."""

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """A stand-in for the class of PySpark 4.2."""
else:
    HAS_READ_LIMITS = True

__all__ = [
    "HAS_READ_LIMITS",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
]
