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
    advice: str = ""
    """What an operator can do, for people."""


class BrokerView(Struct, frozen=True, kw_only=True):
    """A broker group as the metaserver sees it."""

    broker_group: str
    address: str
    available: bool
    """It has reported itself within its ttl; it may take no writes all the same."""
    silent_ms: int
    cordoned: bool = False
    """It gets no new partitions."""
    version: str = ""
    """Of its program, at its last report; "": it told none."""
    writable: bool = True
    """It took writes at its last report."""
    problem: str = ""
    """Why it took none; "": it told no reason."""

    @property
    def state(self) -> str:
        """Its state for people: "available", "takes no writes: the disk is full", "silent for 12
        s".
        """
        if not self.available:
            return f"silent for {self.silent_ms // 1000} s"
        if not self.writable:
            return f"takes no writes: {self.problem}" if self.problem else "takes no writes"
        return "available"

    @property
    def gets_partitions(self) -> bool:
        """Whether new partitions may be placed on it."""
        return self.available and self.writable and not self.cordoned
