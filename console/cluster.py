"""Sums up what the metaserver and all brokers say of subjects and consumer groups. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..admin.views import BrokerList, PartitionReport
from ..protocol.control import SubjectSummary
from ..protocol.operations import OperationView
from ..protocol.routing import PartitionState


@dataclass(slots=True, kw_only=True)
class GroupTotals:
    """A consumer group, over all partitions whose brokers have answered."""

    subject: str
    group: str
    lag: int = 0
    parked: int = 0
    """The number of parked messages, with those that wait for a retry."""
    failing: int = 0
    """The number of partitions on which a message keeps failing."""
    partitions: int = 0
    unknown: bool = False
    """True if a broker has not answered, so that figures may be too low."""
    acked: dict[int, int] = field(default_factory=dict)
    """Maps each partition on which it lags to the number of messages that it has acked."""

    @property
    def needs_help(self) -> bool:
        """True if messages are set aside, or keep failing."""
        return bool(self.parked or self.failing)


@dataclass(slots=True, kw_only=True)
class SubjectTotals:
    """A subject, over all partitions whose brokers have answered."""

    subject: str
    summary: SubjectSummary
    stored: int = 0
    end: int = 0
    """The sum of the end offsets: how many messages were ever stored."""
    partitions: int = 0
    """The number of open ones."""
    groups: dict[str, GroupTotals] = field(default_factory=dict)
    unknown: bool = False
    """True if a broker has not answered, so that figures may be too low."""


@dataclass(slots=True, kw_only=True)
class ClusterSample:
    """The cluster at one moment."""

    subjects: dict[str, SubjectTotals]
    brokers: BrokerList
    hosted: Mapping[str, list[PartitionReport] | str]
    """Maps each available broker group to its partitions, or to why they are unknown."""
    waiting: Sequence[OperationView] = ()
    """The operations that wait."""
    hanging: Collection[str] = ()
    """The silent broker groups that hang; see `Admin.find_hanging`."""

    def groups(self) -> list[GroupTotals]:
        """Return all consumer groups, the one with the largest lag first; of those without a lag,
        first those that have parked messages.
        """
        found = [group for each in self.subjects.values() for group in each.groups.values()]
        return sorted(found, key=lambda each: (-each.lag, -each.parked, each.subject, each.group))

    @property
    def unknown(self) -> list[str]:
        """Why figures may be too low, a sentence each."""
        silent = [
            f"broker group {each.broker_group} is silent: what it has stored is missing here"
            for each in self.brokers.brokers
            if not each.available
        ]
        return silent + [each for each in self.hosted.values() if isinstance(each, str)]


class Standstills:
    """Since when groups have acked nothing of a partition on which they lag."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], dict[int, tuple[int, float]]] = {}
        """By subject and group: by partition, what was acked, and when that was first so."""

    def note(self, groups: Iterable[GroupTotals], now_s: float) -> None:
        """Note what groups have acked now."""
        self._since = {
            (group.subject, group.group): {
                partition: known
                if (known := self._known(group, partition)) is not None and known[0] == acked
                else (acked, now_s)
                for partition, acked in group.acked.items()
            }
            for group in groups
        }

    def _known(self, group: GroupTotals, partition: int) -> tuple[int, float] | None:
        return self._since.get((group.subject, group.group), {}).get(partition)

    def longest_s(self, subject: str, group: str, now_s: float) -> float:
        """Return how long the longest of them lasts, in seconds."""
        since = self._since.get((subject, group), {}).values()
        return max((now_s - since_s for _, since_s in since), default=0.0)


def sum_up(
    subjects: Sequence[SubjectSummary],
    brokers: BrokerList,
    hosted: Mapping[str, list[PartitionReport] | str],
    waiting: Sequence[OperationView] = (),
    hanging: Collection[str] = (),
) -> ClusterSample:
    """Sum up the partitions of each subject and group; those of hidden or unknown subjects are left
    out.
    """
    totals = {each.subject: SubjectTotals(subject=each.subject, summary=each) for each in subjects}
    known = [each for found in hosted.values() if not isinstance(found, str) for each in found]
    for status in known:
        subject = totals.get(status.subject)
        if subject is None or status.state is PartitionState.EXPIRED:
            continue
        subject.partitions += status.state is PartitionState.OPEN
        subject.stored += status.next_offset - status.first_offset
        subject.end += status.next_offset
        for progress in status.groups:
            group = subject.groups.setdefault(
                progress.group, GroupTotals(subject=status.subject, group=progress.group)
            )
            group.lag += progress.lag
            if progress.lag:
                group.acked[status.partition_id] = status.next_offset - progress.lag
            group.parked += progress.parked
            group.failing += progress.failing is not None
            group.partitions += 1
    sample = ClusterSample(
        subjects=totals, brokers=brokers, hosted=hosted, waiting=waiting, hanging=hanging
    )
    if sample.unknown:
        for subject in totals.values():
            subject.unknown = subject.partitions < subject.summary.partitions
            for group in subject.groups.values():
                group.unknown = subject.unknown
    return sample
