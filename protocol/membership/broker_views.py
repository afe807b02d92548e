"""Brokers as the metaserver sees them.  Pure."""

from __future__ import annotations

from msgspec import Struct


class RefusedBroker(Struct, frozen=True, kw_only=True):
    """A broker whose reports for a broker group are refused."""

    broker_group: str
    address: str
    problem: str = ""
    log_end: int = 0
    """Where the log of its data folder ends."""
    known_log_end: int = 0
    """Where the broker group's log ended in the last report that was accepted."""


class BrokerView(Struct, frozen=True, kw_only=True):
    """A broker group as the metaserver sees it."""

    broker_group: str
    address: str
    available: bool
    silent_ms: int
    cordoned: bool = False
    """It gets no new partitions."""
    version: str = ""
    """Of its program, at its last report; "": it told none."""
