"""What the screen knows: the last answers of servers, rates from them, and what is wrong. Pure.

    answers ─▶ note_… ─▶ brokers, groups, subjects, problems
                    └──▶ take_next_to_explain: a group whose lag does not fall

A server that stops answering keeps its last figures; rows with such figures say so.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ...admin.views import BrokerList, GroupDescription
from ...admin.why.lag import STUCK_MS, is_stuck
from ...admin.why.servers import (
    NOT_WRONG,
    UNHEARD,
    server_causes,
    unheard_broker,
    waiting_operation,
)
from ...protocol.operations import OperationView
from ...protocol.text import printable
from ...protocol.why import Cause, Explanation
from .figures import Figures, Labels

WINDOW_S = 5.0
"""The time over which rates are taken, in seconds."""
SAMPLES_MAX = 16
STUCK_S = STUCK_MS / 1000
"""A group's lag does not fall if it was at no time lower for so long, in seconds."""
EXPLAIN_EVERY_S = 30.0
"""The shortest time between two explanations of one group, in seconds."""
STALE_S = 3.0
"""After this time without an answer, what a server has said is stale."""

GroupKey = tuple[str, str]
"""A subject and a consumer group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerFigures:
    """A broker group."""

    name: str
    state: str
    partitions: float | None
    stored_per_s: float | None
    handed_per_s: float | None
    disk_used: float | None
    """The used part of its disk, from 0 to 1."""
    disk_free_bytes: float | None
    folders: str
    copy_lag_bytes: float | None
    """How far the copy that is furthest behind is behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """A consumer group of a subject."""

    subject: str
    group: str
    lag: float
    is_partial: bool
    """True if a broker has never given its figures, so that lag and parked may be too low."""
    lag_s: float | None
    """The age of the oldest message that is not acked, in seconds."""
    slope_per_s: float | None
    """How fast the lag grows; below 0 it falls."""
    acked_per_s: float | None
    consumers: float | None
    parked: float
    stale: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectFigures:
    """A subject."""

    subject: str
    partitions: int | None
    stored_per_s: float | None
    bytes_per_s: float | None
    handed_per_s: float | None
    groups: int
    lag: float
    is_partial: bool
    """True if a broker has never given its figures, so that the lag may be too low."""
    stale: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong, or why nothing is, and the next step."""

    text: str
    step: str = ""
    about: str = ""
    """The group that has it, if the text does not say so."""
    is_wrong: bool = True
    """False if it only says why there is nothing to do."""


@dataclass(slots=True)
class _Server:
    """The last answers of one server."""

    samples: deque[Figures] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    heard_s: float | None = None
    failure: str = ""

    def heard(self, now_s: float) -> None:
        self.heard_s, self.failure = now_s, ""

    def is_stale(self, now_s: float) -> bool:
        return self.heard_s is None or now_s - self.heard_s > STALE_S

    @property
    def last(self) -> Figures | None:
        return self.samples[-1] if self.samples else None

    def window(self) -> tuple[Figures, Figures] | None:
        """Return the figures between which rates are taken."""
        last = self.last
        if last is None or len(self.samples) < 2:
            return None
        first = next(each for each in self.samples if last.at_s - each.at_s <= WINDOW_S)
        return (self.samples[-2] if first is last else first), last


@dataclass(slots=True)
class GroupDetail:
    """What is known of a group that is looked at."""

    subject: str
    group: str
    description: GroupDescription | None = None
    explanation: Explanation | None = None
    problem: str = ""
    heard_s: float | None = None


class Board:
    """What is known of a cluster."""

    def __init__(self, meta: str) -> None:
        self.meta = meta
        self._metaserver = _Server()
        self._metaserver_count = 1
        self._failed_metaservers: dict[str, str] = {}
        self._brokers: dict[str, _Server] = {}
        """The brokers by address."""
        self.listed = BrokerList(brokers=[], refused=[])
        """What the metaserver has said of the brokers."""
        self._hanging: Collection[str] = ()
        self._operations: list[OperationView] = []
        self._began_s: float | None = None
        """When a broker first gave its figures."""
        self._partitions: Mapping[str, int] = {}
        self._lowest: dict[GroupKey, tuple[float, float]] = {}
        """Maps each group to its lowest lag since it began to lag, and when that was first seen."""
        self._explanations: dict[GroupKey, Explanation] = {}
        self._explained_s: dict[GroupKey, float] = {}

    # ── answers ───────────────────────────────────────────────────────────────────────────────────
    def note_brokers(self, brokers: BrokerList, now_s: float) -> None:
        """Note what the metaserver says of the brokers."""
        self._metaserver.heard(now_s)
        self.listed = brokers
        self._brokers = {
            view.address: self._brokers.get(view.address) or _Server(heard_s=now_s)
            for view in brokers.brokers
        }

    def note_hanging(self, broker_groups: Collection[str]) -> None:
        """Note which of the silent brokers hang."""
        self._hanging = broker_groups

    def note_operations(self, waiting: list[OperationView]) -> None:
        """Note the operations that wait."""
        self._operations = waiting

    def note_subjects(self, partitions: Mapping[str, int]) -> None:
        """Note the subjects with the number of their partitions."""
        self._partitions = partitions

    def note_metaservers(self, answers: Mapping[str, Figures | str]) -> None:
        """Note the metrics of each metaserver by address, or why it did not give them."""
        self._metaserver_count = len(answers)
        self._failed_metaservers = {
            address: answer for address, answer in answers.items() if isinstance(answer, str)
        }
        # All of them have the same figures, from one database.
        given = [answer for answer in answers.values() if isinstance(answer, Figures)]
        self._metaserver.samples.extend(given[:1])

    def note_figures(self, address: str, figures: Figures) -> None:
        """Note the metrics of a broker."""
        server = self._brokers.get(address)
        if server is None:
            return
        last = server.last
        if last is not None and _has_restarted(last, figures):
            server.samples.clear()
        # A broker whose lag was not counted before makes the sums higher than they were.
        lowest = self._lowest if server.samples else {}
        server.samples.append(figures)
        server.heard(figures.at_s)
        if self._began_s is None:
            self._began_s = figures.at_s
        lags = self._sum_last("keylane_group_lag_messages")
        self._lowest = {
            (key[0], key[1]): _lowest(lowest.get((key[0], key[1])), lag, figures.at_s)
            for key, lag in lags.items()
            if lag
        }
        for forgotten in self._explanations.keys() - self._lowest.keys():
            del self._explanations[forgotten]
        for forgotten in self._explained_s.keys() - self._lowest.keys():
            del self._explained_s[forgotten]

    def note_failure(self, address: str | None, text: str) -> None:
        """Note why a broker, or the metaserver if it is None, has not answered."""
        server = self._metaserver if address is None else self._brokers.get(address)
        if server is not None:
            server.failure = text

    def note_explanation(self, key: GroupKey, explanation: Explanation) -> None:
        """Note why a group gets no messages, unless it has them by now."""
        if key in self._lowest:
            self._explanations[key] = explanation

    # ── what to ask ───────────────────────────────────────────────────────────────────────────────
    @property
    def addresses(self) -> list[str]:
        """The addresses of the brokers."""
        return [*self._brokers]

    def take_next_to_explain(self, now_s: float) -> GroupKey | None:
        """Return the group with the greatest lag among those whose lag does not fall and that were
        not taken lately.
        """
        due = [
            key
            for key in self._stuck(now_s)
            if now_s - self._explained_s.get(key, -EXPLAIN_EVERY_S) >= EXPLAIN_EVERY_S
        ]
        if not due:
            return None
        self._explained_s[due[0]] = now_s
        return due[0]

    def _stuck(self, now_s: float) -> list[GroupKey]:
        """Return the groups whose lag does not fall, the greatest first. A group that always lags
        by the few messages that its consumers have just got is none of them.
        """
        ages = self._most("keylane_group_lag_seconds")
        lags = self._sum_last("keylane_group_lag_messages")
        stuck = [
            key
            for key, (lowest, since_s) in self._lowest.items()
            if is_stuck(
                lowest,
                falls_per_s=float(now_s - since_s < STUCK_S),  # it was lower than ever
                oldest_ms=ages.get(key, STUCK_S) * 1000,
            )
        ]
        return sorted(stuck, key=lambda key: (-lags.get(key, 0), key))

    # ── what is shown ─────────────────────────────────────────────────────────────────────────────
    def brokers(self, now_s: float) -> list[BrokerFigures]:
        """Return a row for each broker group."""
        rows = []
        for view in self.listed.brokers:
            server = self._brokers[view.address]
            last = server.last
            total = None if last is None else last.one("keylane_broker_disk_bytes")
            free = None if last is None else last.one("keylane_broker_disk_free_bytes")
            copies = {} if last is None else last.of("keylane_broker_copy_lag_bytes")
            state = view.state + (", cordoned" if view.cordoned else "")
            if view.available and server.is_stale(now_s):
                state = f"no figures for {age_text(now_s - (server.heard_s or now_s))}"
            rows.append(
                BrokerFigures(
                    name=view.broker_group,
                    state=state,
                    partitions=None if last is None else last.one("keylane_broker_partitions"),
                    stored_per_s=_sum(_rates(server, "keylane_broker_stored_messages_total")),
                    handed_per_s=_sum(_rates(server, "keylane_broker_handed_messages_total")),
                    disk_used=1 - free / total if total and free is not None else None,
                    disk_free_bytes=free,
                    folders=view.folders_text,
                    copy_lag_bytes=max(copies.values(), default=None),
                )
            )
        return rows

    def groups(self, now_s: float) -> list[GroupFigures]:
        """Return a row for each consumer group that a broker knows, or that has consumers."""
        lags = self._sum_last("keylane_group_lag_messages")
        ages = self._most("keylane_group_lag_seconds")
        parked = self._sum_last("keylane_group_parked_messages")
        metaserver = self._metaserver.last
        sessions = {} if metaserver is None else metaserver.of("keylane_group_sessions")
        stored = self._sum_rates("keylane_broker_stored_messages_total")
        slopes = self._sum_rates("keylane_group_lag_messages")
        stale = self._of_stale("keylane_group_lag_messages", now_s)
        rows = []
        for key in sorted({*lags, *sessions}):
            slope = slopes.get(key)
            # What was stored and did not add to the lag was acked.
            acked = None if slope is None else max(0.0, stored.get(key[:1], 0.0) - slope)
            rows.append(
                GroupFigures(
                    subject=key[0],
                    group=key[1],
                    lag=lags.get(key, 0),
                    is_partial=self._is_partial,
                    lag_s=ages.get(key),
                    slope_per_s=slope,
                    acked_per_s=acked,
                    consumers=None if metaserver is None else sessions.get(key, 0),
                    parked=parked.get(key, 0),
                    stale=key in stale,
                )
            )
        return rows

    def subjects(self, now_s: float) -> list[SubjectFigures]:
        """Return a row for each subject."""
        stored = self._sum_rates("keylane_broker_stored_messages_total")
        stored_bytes = self._sum_rates("keylane_broker_stored_bytes_total")
        handed = self._sum_rates("keylane_broker_handed_messages_total")
        lags: dict[str, float] = defaultdict(float)
        groups: dict[str, int] = defaultdict(int)
        for (subject, _group), lag in self._sum_last("keylane_group_lag_messages").items():
            lags[subject] += lag
            groups[subject] += 1
        stale = self._of_stale("keylane_broker_stored_messages_total", now_s)
        known = self._sum_last("keylane_broker_stored_messages_total")
        names = {*self._partitions, *(key[0] for key in known)}
        return [
            SubjectFigures(
                subject=name,
                partitions=self._partitions.get(name),
                stored_per_s=stored.get((name,)),
                bytes_per_s=stored_bytes.get((name,)),
                handed_per_s=handed.get((name,)),
                groups=groups[name],
                lag=lags[name],
                is_partial=self._is_partial,
                stale=(name,) in stale,
            )
            for name in sorted(names)
        ]

    def is_looking(self, now_s: float) -> bool:
        """Return True if it is too early to say that nothing is wrong."""
        if self._began_s is None:
            return self._metaserver.heard_s is None or bool(self._brokers)
        return now_s - self._began_s < STUCK_S

    def problems(self, now_s: float) -> list[Problem]:
        """Return what is wrong now, the servers first."""
        return [
            *self._metaserver_problems(now_s),
            *map(to_problem, self._broker_causes(now_s)),
            *(to_problem(waiting_operation(each)) for each in self._operations),
            *self._group_problems(now_s),
        ]

    def _metaserver_problems(self, now_s: float) -> Iterable[Problem]:
        if self._metaserver.is_stale(now_s):
            yield Problem(
                f"no figures from the metaserver at {self.meta}{_since(self._metaserver, now_s)}",
                "keylane cluster check",
            )
        elif len(self._failed_metaservers) < self._metaserver_count:
            for address, failure in self._failed_metaservers.items():
                yield Problem(f"the metaserver at {address} gives no figures: {failure}")

    def _broker_causes(self, now_s: float) -> Iterable[Cause]:
        yield from (cause for _, cause in server_causes(self.listed, self._hanging))
        for view in self.listed.brokers:
            server = self._brokers[view.address]
            if view.available and server.is_stale(now_s):
                why = f"has given no figures{_since(server, now_s)}"
                yield unheard_broker(view.broker_group, why, view)

    def _group_problems(self, now_s: float) -> Iterable[Problem]:
        unheard = any(each.code in UNHEARD for each in self._broker_causes(now_s))
        for key in self._stuck(now_s):
            explanation = self._explanations.get(key)
            explained = () if explanation is None else explanation.causes
            # The lines about brokers name those, once for all groups and as long as it is so.
            named = [each for each in explained if each.code not in UNHEARD]
            subject, group = key
            causes = [to_problem(each) for each in named]
            if causes:
                first = next((each for each in causes if each.is_wrong), causes[0])
                yield replace(first, about=f"{group} on {subject}")
            elif not (explained and unheard):
                yield Problem(
                    f"its lag has not fallen for {age_text(now_s - self._lowest[key][1])}",
                    f"keylane why {subject} --group {group}",
                    about=f"{group} on {subject}",
                )

    def stale_for_s(self, now_s: float) -> float | None:
        """Return how long the metaserver has not answered, in seconds; None if it answers, or has
        never answered.
        """
        heard_s = self._metaserver.heard_s
        return now_s - heard_s if heard_s is not None and now_s - heard_s > STALE_S else None

    # ── sums over brokers ─────────────────────────────────────────────────────────────────────────
    @property
    def _is_partial(self) -> bool:
        """True if a broker has never given its figures."""
        return any(server.last is None for server in self._brokers.values())

    def _sum_last(self, name: str) -> dict[Labels, float]:
        sums: dict[Labels, float] = defaultdict(float)
        for server in self._brokers.values():
            for key, value in ({} if server.last is None else server.last.of(name)).items():
                sums[key] += value
        return dict(sums)

    def _most(self, name: str) -> dict[Labels, float]:
        most: dict[Labels, float] = {}
        for server in self._brokers.values():
            for key, value in ({} if server.last is None else server.last.of(name)).items():
                most[key] = max(value, most.get(key, 0.0))
        return most

    def _sum_rates(self, name: str) -> dict[Labels, float]:
        sums: dict[Labels, float] = defaultdict(float)
        for server in self._brokers.values():
            for key, rate in _rates(server, name).items():
                sums[key] += rate
        return dict(sums)

    def _of_stale(self, name: str, now_s: float) -> set[Labels]:
        """Return the labels to whose values a stale server has contributed."""
        return {
            key
            for server in self._brokers.values()
            if server.last is not None and server.is_stale(now_s)
            for key in server.last.of(name)
        }


def to_problem(cause: Cause) -> Problem:
    """Return a cause as it is on the screen."""
    return Problem(cause.text, cause.step, is_wrong=cause.code not in NOT_WRONG)


def age_text(seconds: float) -> str:
    """Return a duration in its largest unit, such as "12 s" or "3 min"."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _since(server: _Server, now_s: float) -> str:
    """Say for how long a server has given no figures, and why."""
    since = "" if server.heard_s is None else f" for {age_text(now_s - server.heard_s)}"
    return f"{since}{server.failure and f': {printable(server.failure)}'}"


def _rates(server: _Server, name: str) -> dict[Labels, float]:
    """Return how fast the values of a metric grow, per second."""
    window = server.window()
    if window is None:
        return {}
    first, last = window
    before = first.of(name)
    passed_s = last.at_s - first.at_s
    return {key: (value - before.get(key, 0.0)) / passed_s for key, value in last.of(name).items()}


def _sum(rates: Mapping[Labels, float]) -> float | None:
    return sum(rates.values()) if rates else None


def _has_restarted(before: Figures, after: Figures) -> bool:
    """Return True if a counter has fallen."""
    name = "keylane_broker_stored_messages_total"
    values = after.of(name)
    return any(values.get(key, 0.0) < value for key, value in before.of(name).items())


def _lowest(known: tuple[float, float] | None, lag: float, now_s: float) -> tuple[float, float]:
    return known if known is not None and known[0] <= lag else (lag, now_s)
