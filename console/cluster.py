"""Sums up what the metaserver and all brokers say of subjects and consumer groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..admin.views import BrokerList, PartitionReport
from ..protocol.control import SubjectSummary
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

    def groups(self) -> list[GroupTotals]:
        """Return all consumer groups, the one with the largest lag first."""
        found = [group for each in self.subjects.values() for group in each.groups.values()]
        return sorted(found, key=lambda each: (-each.lag, each.subject, each.group))

    @property
    def unknown(self) -> list[str]:
        """Why figures may be too low, a sentence each."""
        silent = [
            f"broker group {each.broker_group} is silent: what it has stored is missing here"
            for each in self.brokers.brokers
            if not each.available
        ]
        return silent + [each for each in self.hosted.values() if isinstance(each, str)]


def sum_up(
    subjects: Sequence[SubjectSummary],
    brokers: BrokerList,
    hosted: Mapping[str, list[PartitionReport] | str],
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
        subject.partitions += 1
        subject.stored += status.next_offset - status.first_offset
        subject.end += status.next_offset
        for progress in status.groups:
            group = subject.groups.setdefault(
                progress.group, GroupTotals(subject=status.subject, group=progress.group)
            )
            group.lag += progress.lag
            group.parked += progress.parked
            group.failing += progress.failing is not None
            group.partitions += 1
    sample = ClusterSample(subjects=totals, brokers=brokers, hosted=hosted)
    if sample.unknown:
        for subject in totals.values():
            subject.unknown = subject.unknown or subject.partitions < subject.summary.partitions
    return sample
