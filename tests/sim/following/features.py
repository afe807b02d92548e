"""Worlds in which the subject of a feature is followed, in seeds from FOLLOWED_FEATURES_FIRST on.

The story of such a world is that of a seed with a feature: of three worlds one has cut-overs, one
has deletions, and the third has each feature in turn.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from keylane.broker.partition.partition import HostedPartition
from keylane.broker.store.store import Store
from keylane.checker.events import Event, Ranged, Stored
from keylane.protocol.ids import MAX_I64
from sim.actors.copying import has_copies
from sim.actors.hosts import BrokerHost
from sim.features.cut_overs import CUT, CutOvers
from sim.features.deletions import DOOMED, Deletions
from sim.features.feature import Feature
from sim.features.first_sends import MADE, FirstSends
from sim.features.lacking import OnCopies
from sim.features.scheduling import SchedulingBrokerHost
from sim.features.world import OTHERS_EVERY, SELDOM, SELDOM_EVERY, FeatureWorld, kind_of
from sim.following.company import Following
from sim.following.followers import FollowingHost
from sim.following.judge import Truth, truth_of
from sim.machines.logs import read_log
from sim.run import FEATURES_FIRST, FOLLOWED_FEATURES_FIRST
from sim.world import Outcome

STORIES = 3
CUT_OVERS_AT = next(number for number, kind in SELDOM.items() if kind is CutOvers)
FOLLOWED: dict[type[Feature], tuple[str, bytes]] = {
    CutOvers: (CUT, b"v-"),
    Deletions: (DOOMED, b"d-"),
    FirstSends: (f"{MADE}0", b"f-"),
}
"""By the feature: the subject that is followed, and how the names of its keys begin; of others the
usual ones.
"""


def story_of(index: int) -> int:
    """The number of the feature's world whose story the world of this index has."""
    turn = index // STORIES
    if index % STORIES == 0:
        return SELDOM_EVERY * turn + CUT_OVERS_AT
    return OTHERS_EVERY * turn if index % STORIES == 1 else turn


class DroppingBrokerHost(SchedulingBrokerHost):
    """A broker of which it is known what partitions had when they were dropped."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.subjects: dict[int, str] = {}
        """Of dropped partitions."""
        self.dropped: dict[int, dict[int, Event]] = {}
        """By partition id: by offset its messages, and by -1 its range."""

    def succeed(self, other: BrokerHost) -> None:
        super().succeed(other)
        assert isinstance(other, DroppingBrokerHost)
        self.subjects, self.dropped = other.subjects, other.dropped

    def _open_store(self) -> Store:
        store = super()._open_store()
        forget = store.state.forget_partition

        def watched(partition_id: int) -> None:
            partition = store.state.partitions.get(partition_id)
            if partition is not None:
                self._note_dropped(store, partition)
            forget(partition_id)

        store.state.forget_partition = watched  # type: ignore[method-assign]
        return store

    def _note_dropped(self, store: Store, partition: HostedPartition) -> None:
        number, facts = int(partition.partition_id), partition.facts.partition
        self.subjects[number] = partition.facts.subject
        dropped = self.dropped.setdefault(number, {})
        dropped[-1] = Ranged(number, facts.range_start, facts.range_end)
        stored = read_log(store, number, partition.first_offset, partition.readable_offset)
        dropped.update((event.offset, event) for event in stored if isinstance(event, Stored))


class FollowedFeatureWorld(Following, FeatureWorld):
    """Every host of one such seed."""

    broker_kind = DroppingBrokerHost

    def __init__(self, seed: int) -> None:
        self.index = seed - FOLLOWED_FEATURES_FIRST
        story = story_of(self.index)
        kind = kind_of(story)
        if kind in FOLLOWED:
            self.followed, self.keys_of = FOLLOWED[kind]
        super().__init__(FEATURES_FIRST + story, draws=f"followers of features {self.index}")
        for host in self.followers:
            host.meets_deletions = kind is Deletions
            host.sees_copies = kind is OnCopies
            host.meets_creation = kind in FOLLOWED

    def _has_copies(self) -> bool:
        return has_copies(self.index) and self._kind.may_have_copies

    def _readable(self) -> list[HostedPartition]:
        hidden = self.feature._hidden if isinstance(self.feature, CutOvers) else ()
        return [each for each in super()._readable() if each.partition_id not in hidden]

    def _is_at_the_end(self, host: FollowingHost) -> bool:
        return all(host.is_through(each) or self._passed(host, each) for each in self._readable())

    def _passed(self, host: FollowingHost, rows: HostedPartition) -> bool:
        """Whether a follower is behind rows of which it has not learnt: it was given their
        messages, or the judge tells.
        """
        behind = [
            each.partition_id
            for each in self._readable()
            if rows.partition_id in each.facts.partition.parents
        ]
        return not host.knows(rows.partition_id) and any(map(host.knows, behind))

    def judge(self, drained_s: float) -> Outcome:
        outcome = super().judge(drained_s)
        outcome.seed = FOLLOWED_FEATURES_FIRST + self.index
        return outcome

    def _truth(self) -> Truth:
        """With what partitions had that are gone."""
        feature = self.feature
        hosted = self._firsts.keys()
        members, lives = set(hosted), []
        if isinstance(feature, CutOvers):
            members &= feature.members or set()
        if isinstance(feature, Deletions):
            lives = [life.partitions for life in feature.lives]
            members &= lives[-1] if lives else set()
        dropped = self._dropped()
        return truth_of(
            chain(self.history, *dropped.values()),
            partitions=hosted | dropped.keys(),
            firsts=self._firsts,
            removing=self._removing,
            lost=self.shelf.lost,
            in_order=self.swarm.strict or self.swarm.static or type(feature) in FOLLOWED,
            static=self.swarm.static,
            members=members,
            carried=isinstance(feature, CutOvers),
            lives=lives,
        )

    def _dropped(self) -> dict[int, list[Event]]:
        """By partition that was dropped: its range, and every message that was stored there."""
        by_partition: dict[int, list[Event]] = {}
        for broker in self.brokers:
            assert isinstance(broker, DroppingBrokerHost)
            for number, events in broker.dropped.items():
                if broker.subjects[number] == self.followed:
                    by_partition[number] = [
                        *events.values(),
                        *broker.removed.before(number, MAX_I64),
                    ]
        return by_partition
