"""Errors of planned reads: rows that are gone, and processes of Spark that cannot read.  Pure."""

from __future__ import annotations

from .base import Detail, KeylaneError
from .refusals import OffsetOutOfRangeError


class DataLossError(OffsetOutOfRangeError):
    """Retention has removed rows that a read of a range, or a stream, asks for."""

    code = 1295
    summary = "retention has removed rows of the range"
    hint = "With the option failOnDataLoss=false the read goes on behind the loss; or begin later."
    subject = Detail(str)
    lost_until = Detail(int)
    """One past the last lost offset; the first one is `offset`.  None: the end of the partition is not known."""
    rows = Detail(int)
    """How many rows are lost; None: not known."""
    stored_before_ms = Detail(int)
    """The lost rows were stored before this time, in milliseconds since 1970."""


class SparkProcessError(KeylaneError):
    """A process of Spark cannot run keylane: a package is missing or another version, or Java is."""

    code = 1296
    summary = "a process of Spark cannot run keylane"
    hint = "docs/SPARK.md says what each machine of a cluster needs."
    python = Detail(str)
    """The Python that runs the process."""
    missing = Detail(str)
    """The module that it lacks."""
