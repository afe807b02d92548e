"""The metaserver's view of its cluster: its version, servers and brokers. Pure."""

from __future__ import annotations

from msgspec import Struct


class RefusedBroker(Struct, frozen=True, kw_only=True):
    """A broker whose reports for a broker group are refused."""

    broker_group: str
    address: str
    problem: str = ""
    log_end: int = 0
    """The end of the log in its data folder, in bytes."""
    known_log_end: int = 0
    """The end of the broker group's log in its last accepted report, in bytes."""
    advice: str = ""
    """Advice for an operator."""


class BrokerView(Struct, frozen=True, kw_only=True):
    """The metaserver's view of a broker group."""

    broker_group: str
    address: str
    available: bool
    """True if it has reported within its ttl. It may still refuse writes."""
    silent_ms: int
    cordoned: bool = False
    """True if it does not receive new partitions."""
    version: str = ""
    """The version in its last report; "" if it did not report one."""
    writable: bool = True
    """True if it accepted writes at its last report."""
    problem: str = ""
    """The reason why it did not accept writes; "" if it did not report one."""
    folders_wanted: int = 1
    """How many data folders the group is to have: the broker's own, and copies."""
    folders: int = 1
    """How many of them have everything that was acked: the broker's own, and the copies that acks
    wait for.
    """
    quarantine: str = ""
    """The reason why no copy takes the broker's place, although acks may wait for it: the database
    is older than what brokers know; otherwise "".
    """
    has_partitions: bool = True
    """False if it has no partition, but for expired ones. True also if a metaserver of 0.2 answers,
    which does not tell.
    """
    refusing_ms: int | None = None
    """The time for which it has accepted no writes, in milliseconds; None if it accepts them, or if
    not known.
    """
    copies: tuple[str, ...] = ()
    """The ids of the copies that acks wait for."""
    promoted: str = ""
    """The copy that has the broker's place and does not serve yet; "" if there is none."""
    refused_copies: dict[str, str] = {}
    """Maps each copy that has lately asked for the broker's place in vain to the reason, as far as
    the metaserver that answers knows.
    """

    @property
    def state(self) -> str:
        """The state as text, such as "available", "takes no writes: the disk is full" or "silent
        for 12 s".
        """
        if not self.available:
            return f"silent for {self.silent_ms // 1000} s"
        if not self.writable:
            return f"takes no writes: {self.problem}" if self.problem else "takes no writes"
        return "available"

    @property
    def folders_text(self) -> str:
        """The data folders as text, such as "1", "2 of 2" or "1 of 2: too few"."""
        if self.folders_wanted == self.folders == 1 and not self.quarantine:
            return "1"
        too_few = ": too few" if self.folders < self.folders_wanted else ""
        problem = ": quarantined" if self.quarantine else too_few
        return f"{self.folders} of {self.folders_wanted}{problem}"

    @property
    def gets_partitions(self) -> bool:
        """True if new partitions may be placed on it."""
        return self.available and self.writable and not self.cordoned


class MemberView(Struct, frozen=True):
    """A server of the cluster."""

    name: str
    version: str
    """The version of its program; "" if it does not report one."""


class ClusterView(Struct, frozen=True, kw_only=True):
    """A cluster, and the progress of its upgrade."""

    name: str
    """The name of the cluster; "" if it is not named in any settings."""
    version: str
    """The lowest version of all members, which determines the formats that are written. It never
    decreases.
    """
    members: tuple[MemberView, ...]
    held_back_by: tuple[str, ...]
    """The names of the members that are older than the newest one."""
