"""The answer to why messages do not arrive at a consumer group: causes, each with a next step.
Pure.
"""

from __future__ import annotations

from msgspec import Struct


class Cause(Struct, frozen=True, kw_only=True):
    """One reason why messages do not arrive. Its texts have no control characters."""

    code: str
    """The kind of the cause, such as "no_consumer"; it is the same in later versions."""
    text: str
    """What is wrong, where, and since when, as a sentence without a period."""
    step: str
    """The next step: a command, or what to look at."""
    partitions: tuple[int, ...] = ()
    """The ids of the partitions where it is so; () if it does not concern single partitions."""


class Explanation(Struct, frozen=True, kw_only=True):
    """Why messages of a subject do not arrive at a consumer group."""

    subject: str
    group: str
    key: bytes | None
    causes: tuple[Cause, ...]
    """The most likely one first; there is at least one."""
    unknown: tuple[str, ...] = ()
    """What is not known, and why, such as "what broker group g1 knows: it has not answered"."""
