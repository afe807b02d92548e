"""Says in lines for a log which partitions a consumer has, how far it is behind, why it lost
leases, and that its event loop was blocked. Pure.

AssignmentLines.format_partitions(ids, …)   "has partitions 1, 2; got 2 from vm:812 (rebalance)"
AssignmentLines.format_lag(messages, …)     after a minute, then ever more rarely
Losses.take_lines(now_ms)                   which leases were lost, those with one reason together
Stalls.line(late_ms, now_ms)                for how long the event loop was blocked
waiting_text(group)                         who has the partitions for which a member waits
unanswered_text(error)                      if the metaserver does not say
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from enum import StrEnum

from ...protocol.control import GroupView, LeaseEnd, PreviousOwner
from ...protocol.errors import KeylaneError
from ...protocol.text import counted, format_seconds, listed

LINE_MS_MIN = 1_000
"""The minimum time between two log lines about partitions, in milliseconds, so that a rebalance of
many partitions makes one line.
"""
WAITS = "other members have them, or leases of dead ones must end"
HOLDERS_NAMED_MAX = 3
"""The maximum number of other members that a log line names."""
OTHERS = "from other members"
LAG_EACH_MS = 60_000
LAG_EACH_MS_MAX = 3_600_000
"""The maximum time until the next log line about a lag, in milliseconds; the interval doubles while
the lag lasts.
"""
LAG_S_MIN = 30.0
"""The age of the oldest message, in seconds, above which the lag is logged."""

PARTITIONS_NAMED_MAX = 5
STALLS_KEPT_MAX = 1_000
STALL_LINE_EVERY_MS = 60_000
"""The minimum interval between log lines about stalls, in milliseconds."""
STALL_MIN_MS = 100
"""The minimum delay, in milliseconds, that counts as a stall; with shorter delays the loop is busy,
not blocked.
"""
HEARTBEATS_PER_TTL = 3
BLOCKED_REASON = (
    "code in this program blocked it (a handler that blocks needs threads: "
    "settings=ConsumerSettings(threads=8)), "
    "or the program or its machine was stopped"
)
FENCED = (
    "its broker has seen a newer fencing token, so another consumer owns it or an operator set the "
    "group's progress"
)
SESSION_ENDED = (
    "the metaserver no longer knows this session: it expired, its instance name was taken over, or "
    "the group was switched or deleted"
)


class EndCause(StrEnum):
    """Why a consumer hands a partition over, as its log says it."""

    FENCED = "fenced"
    LAPSED = "lease ran out"
    SESSION_ENDED = "session ended"
    DRAINED = "handled to its end"
    SUSPENDED = "suspended"
    REBALANCE = "rebalance"

    @property
    def is_loss(self) -> bool:
        """True if neither the metaserver nor the user has requested the hand-over."""
        return self in {EndCause.FENCED, EndCause.LAPSED, EndCause.SESSION_ENDED}


class AssignmentLines:
    """Formats the log lines of one consumer; times are in milliseconds on the boot clock."""

    def __init__(self) -> None:
        self._logged: frozenset[int] | None = None
        self._logged_ms = -LINE_MS_MIN
        self._causes: dict[int, str] = {}
        """Why partitions ended since the last line."""
        self._sources: dict[int, str] = {}
        """From whom partitions came since the last line."""
        self._lag_due_ms = 0
        self._lag_pause_ms = LAG_EACH_MS

    def note_end(self, partition_id: int, cause: str) -> None:
        """Note why a partition ends, for the next line."""
        self._causes[partition_id] = cause

    def note_start(self, partition_id: int, source: str) -> None:
        """Note from whom a partition comes, for the next line; see `source_text`."""
        self._sources[partition_id] = source

    def format_partitions(self, ids: Collection[int], now_ms: int, waits_for: str = WAITS) -> str:
        """Return the log line for these partitions, or "" if they have not changed or were logged
        recently. `waits_for` says why there may be none.
        """
        current_ids, previous_ids = frozenset(ids), self._logged
        if current_ids == previous_ids or now_ms - self._logged_ms < LINE_MS_MIN:
            return ""
        self._logged = current_ids
        self._logged_ms = now_ms
        changes = []
        assigned_ids = sorted(current_ids - (previous_ids or frozenset()))
        # The first partitions are named only with members from whom they came.
        if not previous_ids:
            assigned_ids = [key for key in assigned_ids if self._sources.get(key)]
        if assigned_ids:
            sources = {key: self._sources.get(key, "") for key in assigned_ids}
            changes.append(f"got {_grouped(_with_few_sources(sources), '{} {}')}")
        if revoked_ids := sorted((previous_ids or frozenset()) - current_ids):
            causes = {key: self._causes.get(key, "") for key in revoked_ids}
            changes.append(f"no longer has {_grouped(causes, '{} ({})')}")
        self._causes.clear()
        self._sources.clear()
        if not current_ids:
            state = "has no partition" + (" yet" if previous_ids is None else " now")
            return "; ".join([f"{state}; {waits_for}", *changes])
        noun = "partition" if len(current_ids) == 1 else "partitions"
        return "; ".join([f"has {noun} {listed(sorted(current_ids))}", *changes])

    def format_lag(self, messages: int, seconds: float, now_ms: int) -> str:
        """Return the log line for a lag, or "" if the lag is short or was logged recently."""
        if seconds < LAG_S_MIN:
            self._lag_pause_ms = LAG_EACH_MS
            return ""
        if now_ms < self._lag_due_ms:
            return ""
        self._lag_due_ms = now_ms + self._lag_pause_ms
        self._lag_pause_ms = min(2 * self._lag_pause_ms, LAG_EACH_MS_MAX)
        return f"is {counted(messages, 'message')} behind; the oldest has waited {seconds:.0f} s"


def source_text(previous: PreviousOwner | None) -> str:
    """Return from whom a member got a partition, and why: "from vm:812, whose lease ended"; "" if
    nobody had it before, or this is unknown.
    """
    if previous is None:
        return ""
    if previous.end is LeaseEnd.REBALANCE:
        return f"from {previous.client} (rebalance)"
    return f"from {previous.client}, {_ENDS[previous.end]}"


_ENDS = {
    LeaseEnd.EXPIRED: "whose lease ended",
    LeaseEnd.RELEASED: "which released its lease",
    LeaseEnd.LEFT: "which left",
    LeaseEnd.REPLACED: "which was replaced",
    LeaseEnd.ENDED: "whose session an operator ended",
}


def _with_few_sources(sources: Mapping[int, str]) -> dict[int, str]:
    """Return the source of each partition, with OTHERS for all but the first HOLDERS_NAMED_MAX."""
    named = list(dict.fromkeys(filter(None, sources.values())))[:HOLDERS_NAMED_MAX]
    return {key: source if source in {"", *named} else OTHERS for key, source in sources.items()}


def _grouped(reasons: Mapping[int, str], form: str) -> str:
    """Return the ids as "3, 4 (rebalance), 7 (lease ran out)": those with the same reason
    together.
    """
    ids_by_reason: dict[str, list[int]] = {}
    for partition_id, reason in reasons.items():
        ids_by_reason.setdefault(reason, []).append(partition_id)
    return ", ".join(
        form.format(listed(ids), reason) if reason else listed(ids)
        for reason, ids in ids_by_reason.items()
    )


def unanswered_text(error: KeylaneError) -> str:
    """Return the reason why a member has no partition, if no metaserver answers who has them."""
    return f"the metaserver, which grants them, does not answer: {error.message}"


def waiting_text(group: GroupView, own_client: str) -> str:
    """
    Return the reason why a member of an exclusive group has no partition: how many members there
    are, who owns the partitions, and until when they are reserved for a member that has stopped
    sending heartbeats.

    Args:
        own_client: the name of the member. If it is alone, partitions under its name are its own,
            which it is just being granted.
    """
    is_alone = group.sessions <= 1
    partitions_of: dict[str, list[int]] = {}
    for owner in group.owners:
        if owner.client is not None and not (is_alone and owner.client == own_client):
            partitions_of.setdefault(owner.client, []).append(int(owner.partition.partition_id))
    ends_in_ms = {
        member.client: member.expires_in_ms
        for member in group.members
        if member.heard_ms > member.expires_in_ms
    }
    holders = []
    for client, ids in list(partitions_of.items())[:HOLDERS_NAMED_MAX]:
        until = ends_in_ms.get(client)
        end = (
            ""
            if until is None
            else f" until its lease ends in {format_seconds(until)}, or it is heard"
        )
        holders.append(f"{client} has {listed(ids)}{end}")
    if more := len(partitions_of) - len(holders):
        holders.append(f"{counted(more, 'more member')} {'has' if more == 1 else 'have'} others")
    if is_alone:
        return "; ".join(["it is being granted them", *holders])
    members = counted(group.sessions, "member")
    text = f"{members} for {counted(len(group.owners), 'partition')}: this one waits"
    if group.sessions <= len(group.owners):  # each member gets at least one
        text += " for its share"
    return "; ".join([text, *holders])


class Stalls:
    """Measures stalls of the event loop by how late a sleeping task wakes up. Times are in
    milliseconds on the boot clock.
    """

    def __init__(self) -> None:
        self._due_ms = 0
        self._stalls: deque[tuple[int, int]] = deque(maxlen=STALLS_KEPT_MAX)
        """The (end, length) of each stall, in milliseconds."""
        self._line_ms = -STALL_LINE_EVERY_MS

    def record_sleep(self, now_ms: int, sleep_ms: int) -> None:
        """Record that the task goes to sleep and should wake up in `sleep_ms`."""
        self._due_ms = now_ms + sleep_ms

    def record_wake(self, now_ms: int) -> int:
        """Record that the task woke up. Return its delay, or 0 if it is below STALL_MIN_MS."""
        late_ms = self._late_ms(now_ms)
        self._due_ms = 0
        if late_ms:
            self._stalls.append((now_ms, late_ms))
        return late_ms

    def line(self, late_ms: int, now_ms: int, *, ttl_ms: int, margin_ms: int) -> str:
        """
        Return the log line for the stalls of the last `ttl_ms`, or "" if no stall has just ended,
        if they are short, or if the last line is too recent.

        Args:
            late_ms: the length of the stall that has just ended; 0: none has.
            margin_ms: how much earlier than its ttl a lease ends at the consumer.
        """
        if not late_ms or now_ms - self._line_ms < STALL_LINE_EVERY_MS:
            return ""
        total_ms = max(late_ms, self.total_ms(now_ms - ttl_ms, now_ms))
        if total_ms < ttl_ms // HEARTBEATS_PER_TTL:
            return ""
        self._line_ms = now_ms
        lease = format_seconds(ttl_ms - margin_ms)
        period = "" if total_ms == late_ms else f" of the last {format_seconds(ttl_ms)}"
        return (
            f"the event loop did not run for {format_seconds(total_ms)}{period}: {BLOCKED_REASON}; "
            f"leases end {lease} after the last answered heartbeat was sent"
        )

    def total_ms(self, since_ms: int, now_ms: int) -> int:
        """Return the length, in milliseconds, of all stalls that ended after `since_ms` or are
        still going on.
        """
        ended_ms = sum(stall_ms for end_ms, stall_ms in self._stalls if end_ms > since_ms)
        return ended_ms + self._late_ms(now_ms)

    def _late_ms(self, now_ms: int) -> int:
        late_ms = now_ms - self._due_ms if self._due_ms else 0
        return late_ms if late_ms >= STALL_MIN_MS else 0


class Losses:
    """
    Collects lost leases by reason, so that leases lost together share a log line. Leases that a
    blocked event loop loses repeatedly share one line per minute.
    """

    def __init__(self) -> None:
        self._lost: dict[str, list[str]] = {}
        self._blocked: list[str] = []
        """Leases lost because of a blocked event loop since the last line about it."""
        self._blocked_reason = ""
        self._blocked_line_ms = -STALL_LINE_EVERY_MS

    def add(self, partition_id: int, token: int, reason: str, *, fence: int = 0) -> None:
        """Add a lost lease. `fence` is the newer token; 0 if it is unknown."""
        fenced = f", newer token {fence}" if fence else ""
        lease = f"{partition_id} (token {token}{fenced})"
        if BLOCKED_REASON in reason:
            self._blocked.append(lease)
            self._blocked_reason = reason
        else:
            self._lost.setdefault(reason, []).append(lease)

    def take_lines(self, now_ms: int, *, last: bool = False) -> list[str]:
        """Return the log lines that are due, or all of them if `last` is set, and forget their
        leases.
        """
        lost = self._lost
        self._lost = {}
        if self._blocked and (last or now_ms - self._blocked_line_ms >= STALL_LINE_EVERY_MS):
            lost[self._blocked_reason] = self._blocked
            self._blocked = []
            self._blocked_line_ms = now_ms
        return [
            f"lost the lease of {_name_partitions(partitions)}: {reason}"
            for reason, partitions in lost.items()
        ]


def lapse_reason(*, silent_ms: int, stalled_ms: int) -> str:
    """Return why a lease lapsed: the metaserver did not reply for `silent_ms`, and the event loop
    was blocked for `stalled_ms` of that time, in which it sends and receives no heartbeat.
    """
    stalled = f"the event loop did not run for {format_seconds(stalled_ms)}"
    if 2 * stalled_ms >= silent_ms:
        return f"{stalled}: {BLOCKED_REASON}"
    blocked = f", of which {stalled}: {BLOCKED_REASON}" if stalled_ms else ""
    return f"the metaserver answered no heartbeat for {format_seconds(silent_ms)}{blocked}"


def _name_partitions(partitions: list[str]) -> str:
    more_count = len(partitions) - PARTITIONS_NAMED_MAX
    word = "partition" if len(partitions) == 1 else "partitions"
    return f"{word} {', '.join(partitions[:PARTITIONS_NAMED_MAX])}" + (
        f" and {more_count} more" if more_count > 0 else ""
    )
