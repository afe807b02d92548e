"""Names why messages do not arrive at a consumer group, the most likely cause first. Pure.

    facts ─▶ each rule below, in the order of RULES ─▶ causes: what is wrong, since when, what to do

What holds for every message comes first, then what holds for some of them. Among these the order is
that of a message: it is not stored, nobody has it, somebody fails with it, it waits for another, it
was there and is gone. A rule that follows from another comes after it: a partition waits for its
parent because the handler fails there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from ...protocol.control import BrokerView, EndedMember, GroupMember
from ...protocol.groups import FailurePolicy
from ...protocol.parked import (
    FAILING_COUNTED_MAX,
    OTHERS_FAILING_MAX,
    FailingMessage,
    ParkedTotals,
    ParkState,
)
from ...protocol.routing import ConsumeStrategy, PartitionState
from ...protocol.text import (
    counted,
    format_age,
    format_moment,
    format_rate,
    format_seconds,
    key_digest,
    listed,
    printable,
)
from ...protocol.why import Cause, Explanation
from ..parked_views import ParkedKeyView
from ..views import PartitionProgress
from .facts import Facts
from .lag import is_stuck
from .servers import (
    no_take_over,
    numbered,
    refusing_broker,
    silent_broker,
    unheard_broker,
    waiting_operation,
)

TEXT_CHARS_SHOWN = 200
OTHER_TEXT_CHARS_SHOWN = 80
CLIENTS_NAMED_MAX = 3
"""The largest number of consumers for which a step has a command each."""
LATE_MS = 10_000
"""How long after its delivery time a scheduled message is late, in milliseconds."""
CLOCK_MS = 5_000
"""How far a clock may be off before it is named, in milliseconds."""
_PLAIN_WORD = re.compile(r"[\w.][\w.:-]{0,79}", re.ASCII)
"""Matches an order key or a name that needs no quotes in a shell."""


def explain(facts: Facts) -> Explanation:
    """Name the causes that the facts show."""
    causes = [cause for rule in RULES for cause in rule(facts)]
    if _is_handled(facts) and not any(cause.code in _SET_ASIDE for cause in causes):
        newer = [cause for cause in causes if cause.code in _MAY_BE_NEWER]
        causes = [*newer, _nothing_wrong(facts), *(each for each in causes if each not in newer)]
    elif all(cause.code in _ASIDE for cause in causes):
        causes += [_nothing_wrong(facts)]
    return Explanation(
        subject=facts.group.subject,
        group=facts.group.group,
        key=facts.key,
        # Names and errors of users are in the texts.
        causes=tuple(
            replace(each, text=printable(each.text), step=printable(each.step)) for each in causes
        ),
        unknown=tuple(map(printable, facts.unknown)),
    )


# ── the group as a whole ──────────────────────────────────────────────────────────────────────────
def _suspended(facts: Facts) -> Iterator[Cause]:
    group, settings = facts.group, facts.group.settings
    if settings is None:
        return
    if settings.suspended:
        yield Cause(
            code="group_suspended",
            text=f"an operator {_suspended_when(settings.suspended_ms, group.group, facts)}: its "
            "consumers get nothing",
            step=f"keylane group resume {group.subject} {group.group}",
        )
    elif settings.suspended_clients and group.members and all(m.suspended for m in group.members):
        names = listed(settings.suspended_clients)
        whom = f"every running consumer of {group.group}"
        yield Cause(
            code="clients_suspended",
            text=f"an operator {_suspended_when(settings.clients_suspended_ms, whom, facts)}: "
            f"{names}",
            step="; ".join(
                f"keylane group resume {group.subject} {group.group} --client {_shell_word(each)}"
                for each in settings.suspended_clients[:CLIENTS_NAMED_MAX]
            ),
        )


def _suspended_when(ms: int | None, whom: str, facts: Facts) -> str:
    if ms is None:
        return f"has suspended {whom}"
    return f"suspended {whom} {_ago(facts.now_ms - ms, facts)}"


def _reset(facts: Facts) -> Iterator[Cause]:
    group, reset = facts.group, facts.group.reset
    if reset is not None:
        waits = (
            f"it waits for {listed(reset.waits_for)} to hand over"
            if reset.waits_for
            else "its cursors are being set"
        )
        asked = ""
        if reset.asked_ms is not None:
            asked = f", asked for {_ago(facts.now_ms - reset.asked_ms, facts)},"
        yield Cause(
            code="reset_pending",
            text=f"a reset of {group.group} to {reset.to}{asked} is under way, and no partition is "
            f"granted meanwhile: {waits}",
            step=f"keylane group reset {group.subject} {group.group} --cancel"
            if not reset.begun
            else "wait until its cursors are set",
        )


def _no_consumer(facts: Facts) -> Iterator[Cause]:
    group = facts.group
    if group.sessions:
        return
    start = f"start a consumer of {group.subject} in the group {group.group}"
    step, ended = start, group.ended
    if ended is not None and ended.left:
        since = "" if ended.ended_ms is None else f" {format_age(ended.ended_ms)} ago"
        how = f"no consumer of {group.group} runs: the last one, {ended.client}, left{since}"
    elif ended is not None:
        how = (
            f"no consumer of {group.group} is heard: {_end_text(ended)}: it is dead, cut off, or "
            "its event loop is blocked"
        )
        step = f"look whether its process still runs, and at its log; if it has ended, {start}"
    elif any(each.token for each in group.partitions):
        since = "" if group.silent_ms is None else f" for {format_age(group.silent_ms)}"
        how = f"no consumer of {group.group} has sent a heartbeat{since}"
    else:
        how = f"no consumer has joined group {group.group} yet"
        step = (
            f"{start}, such as: keylane consume {group.subject} --group {group.group}; "
            f"keylane group list {group.subject} shows whether its name is spelled otherwise"
        )
    yield Cause(code="no_consumer", text=how, step=step)


def _end_text(ended: EndedMember) -> str:
    """Return how the leases of a consumer ended that was not heard any more."""
    since = "" if ended.ended_ms is None else f" {format_age(ended.ended_ms)} ago"
    if ended.heard_ms is None:
        return (
            f"the leases of the last one, {ended.client}, ended{since}, because it had sent no "
            "heartbeat for its ttl"
        )
    return (
        f"the last one, {ended.client}, was last heard {format_age(ended.heard_ms)} ago, and its "
        f"leases ended{since}"
    )


# ── servers and producers ─────────────────────────────────────────────────────────────────────────
def _silent_everywhere(facts: Facts) -> Iterator[Cause]:
    """Silent brokers, if no other broker has messages in question."""
    if _is_silent_everywhere(facts):
        yield from _silent(facts, _silent_groups(facts))


def _is_silent_everywhere(facts: Facts) -> bool:
    return {each.broker_group for each in facts.partitions} <= _silent_groups(facts)


def _silent_awaited(facts: Facts) -> Iterator[Cause]:
    """Silent brokers for which producers or consumers wait: these are more likely gone or hanging
    than cut off.
    """
    if not _is_silent_everywhere(facts):
        yield from _silent(facts, _awaited(facts))


def _silent_in_part(facts: Facts) -> Iterator[Cause]:
    if not _is_silent_everywhere(facts):
        yield from _silent(facts, _silent_groups(facts) - _awaited(facts))


def _awaited(facts: Facts) -> set[str]:
    waiting = {each.broker_group for each in facts.group.waiting_producers}
    waiting |= {name for member in facts.group.members for name in member.unreached}
    return _silent_groups(facts) & waiting


def _silent_groups(facts: Facts) -> set[str]:
    return {each.broker_group for each in facts.brokers if not each.available} | set(facts.silent)


def _silent(facts: Facts, names: set[str]) -> Iterator[Cause]:
    for name in sorted(names):
        broker, partitions = facts.broker_of(name), facts.partitions_on(name)
        if broker is not None and not broker.available:
            yield silent_broker(broker, partitions, accepts=facts.accepts.get(name, False))
        else:
            why, accepts = facts.silent[name], facts.accepts.get(name, True)
            yield unheard_broker(name, why, broker, partitions, accepts=accepts)
        is_gone = broker is not None and not (broker.available and facts.accepts.get(name, True))
        if broker is not None and is_gone and (cause := no_take_over(broker, partitions)):
            yield cause


def _refusing(facts: Facts) -> Iterator[Cause]:
    for broker in facts.brokers:
        health = facts.health.get(broker.broker_group)
        if _refuses(broker, facts):
            yield refusing_broker(
                broker,
                (health.reason if health is not None else "") or broker.problem,
                facts.partitions_on(broker.broker_group),
                waits_for_copies=health is not None
                and bool(health.details.get("waits_for_copies")),
            )


def _damaged(facts: Facts) -> Iterator[Cause]:
    """Partitions of which the disk has lost messages."""
    for each in facts.partitions:
        health = facts.health.get(each.broker_group)
        damage = None if health is None else health.details.get("damage")
        for line in damage if isinstance(damage, list) else ():
            if str(line).startswith(f"partition {each.partition_id} has lost "):
                yield Cause(
                    code="log_damaged",
                    text=f"the log of broker group {each.broker_group} is damaged: {line}",
                    step=f"keylane broker health {each.address or 'ADDRESS'}; Damage, in "
                    "docs/OPERATING.md, says what to do",
                    partitions=(each.partition_id,),
                )


def _refuses(broker: BrokerView, facts: Facts) -> bool:
    """Return True if a broker takes no messages: as it says itself, or else as the metaserver
    knows.
    """
    health = facts.health.get(broker.broker_group)
    refuses = not broker.writable if health is None else not health.ready
    return broker.available and refuses


def _waiting_producers(facts: Facts) -> Iterator[Cause]:
    """Producers whose messages for these partitions are not stored."""
    silent = _silent_groups(facts)
    refusing = {each.broker_group for each in facts.brokers if _refuses(each, facts)}
    for each in facts.group.waiting_producers:
        partitions = facts.partitions_on(each.broker_group)
        if not partitions or each.broker_group in silent:
            continue
        step = (
            "have the broker take messages again"
            if each.broker_group in refusing
            else "check the network between this producer and the broker"
        )
        yield Cause(
            code="producer_waits",
            text=f"the producer {each.client} has {counted(each.messages, 'message')} that "
            f"{'is' if each.messages == 1 else 'are'} not stored yet: for "
            f"{format_age(each.waiting_ms)} it has waited for broker group "
            f"{each.broker_group}: {each.reason[:TEXT_CHARS_SHOWN]}",
            step=f"{step}; producer.waiting() lists the messages by key",
            partitions=partitions,
        )


def _over_quota(facts: Facts) -> Iterator[Cause]:
    limited: dict[str, list[int]] = {}
    for number, status in facts.statuses.items():
        if status.limited_ms > 0:
            limited.setdefault(status.limited_by, []).append(number)
    for limit, partitions in limited.items():
        longest = max(facts.statuses[each].limited_ms for each in partitions)
        for_ms = max(facts.statuses[each].limited_for_ms for each in partitions)
        again = f", again and again {_for(facts.now_ms - for_ms, facts)}" if for_ms else ""
        yield Cause(
            code="over_quota",
            text=f"calls about {facts.group.subject} wait for a quota, the limit of {limit}: "
            f"{format_seconds(longest)} now{again}",
            step="keylane access quota list; keylane access quota set --help shows how to raise it",
            partitions=tuple(partitions),
        )


# ── owners ────────────────────────────────────────────────────────────────────────────────────────
def _unheard_owners(facts: Facts) -> Iterator[Cause]:
    """Owners that may be dead: their leases have to end first."""
    for member in facts.group.members:
        owned = _owned_by(facts, member.client)
        if member.heard_ms > member.expires_in_ms and (owned or _is_shared(facts)):
            yield Cause(
                code="owner_unheard",
                text=(
                    f"consumer {member.client} was last heard {format_age(member.heard_ms)} ago: "
                    "it is dead, cut off, or its event loop is blocked; "
                    f"{numbered(owned, 'what it holds')} may move to another consumer in "
                    f"{format_seconds(member.expires_in_ms)}, when its lease ends"
                ),
                step="look at its log; if it is dead, another consumer takes over by itself",
                partitions=owned,
            )


def _cut_off(facts: Facts) -> Iterator[Cause]:
    """Consumers that cannot connect to brokers that others reach."""
    silent = _silent_groups(facts)
    for member in facts.group.members:
        lasts_ms = dict(zip(member.unreached, member.unreached_ms, strict=False))
        for name in member.unreached:
            partitions = facts.partitions_on(name)
            served = [
                each.owner
                for each in facts.progress
                if each.partition_id in partitions and each.owner not in {None, member.client}
            ]
            are_served = len(served) == len(partitions) and not _is_shared(facts)
            if name in silent or not partitions or are_served:
                continue
            broker = facts.broker_of(name)
            lasting = _lasting(lasts_ms.get(name), facts)
            gets = "it has got" if lasting else "it gets"
            yield Cause(
                code="owner_cut_off",
                text=f"consumer {member.client} cannot connect to broker group {name}, which the "
                f"cluster still reports alive: {gets} nothing of {numbered(partitions)}{lasting}",
                step=f"check the network between it and the broker"
                f"{'' if broker is None else f' at {broker.address}'}",
                partitions=partitions,
            )


def _promised(facts: Facts) -> Iterator[Cause]:
    """Partitions whose brokers let nobody in, because of a promise to the owner before."""
    for each in facts.progress:
        if not _waits_for_promise(each) or not _concerns(each, facts):
            continue
        waits = "nobody is let in to" if each.owner is None else f"consumer {each.owner} waits for"
        before = f", {each.previous_owner}," if each.previous_owner else ""
        yield Cause(
            code="promised",
            text=f"{waits} partition {each.partition_id}: broker group {each.broker_group} has "
            f"promised the owner before{before} which cannot reach a metaserver, that nobody else "
            f"gets it for {format_seconds(each.promised_ms)}; until then that one may handle its "
            "messages",
            step="wait: the promise ends by itself, or when that consumer hands over; check the "
            "network between it and the metaservers",
            partitions=(each.partition_id,),
        )


def _waits_for_promise(progress: PartitionProgress) -> bool:
    return progress.promised_ms > 0 and progress.holder != progress.session


def _not_granted(facts: Facts) -> Iterator[Cause]:
    settings = facts.group.settings
    numbers = {each.partition_id for each in facts.progress if each.owner is None}
    waiting = () if settings is None else tuple(n for n in settings.unstarted if n in numbers)
    if waiting and facts.group.sessions:
        yield Cause(
            code="not_granted",
            text=f"{numbered(waiting)} cannot be granted yet: "
            f"{'its broker has' if len(waiting) == 1 else 'their brokers have'} not stored where "
            f"{facts.group.group} starts",
            step="keylane broker list; it continues once the brokers answer the metaserver",
            partitions=waiting,
        )


def _hand_over(facts: Facts) -> Iterator[Cause]:
    for each in facts.progress:
        if each.hands_over_to is not None and _concerns(each, facts):
            yield Cause(
                code="hand_over",
                text=f"consumer {each.owner} has to hand over partition {each.partition_id} to "
                f"{each.hands_over_to}, and first finishes the messages that it is handling",
                step="look at its log if that takes longer than its handler",
                partitions=(each.partition_id,),
            )


def _unowned(facts: Facts) -> Iterator[Cause]:
    """Partitions that no consumer has, though some run."""
    group, silent = facts.group, _silent_groups(facts)
    unstarted = () if group.settings is None else group.settings.unstarted
    if not group.sessions or _is_shared(facts) or group.reset is not None:
        return
    free = tuple(
        each.partition_id
        for each in facts.progress
        if each.owner is None
        and each.lag != 0
        and each.broker_group not in silent  # that is why
        and each.partition_id not in unstarted
        and _concerns(each, facts)
        and not facts.unread_parents(each)
    )
    if free and not (group.settings is not None and group.settings.suspended):
        yield Cause(
            code="no_owner",
            text=f"no consumer has {numbered(free)}: a lease has just ended, or nobody has taken "
            f"{'it' if len(free) == 1 else 'them'} over yet{_last_end(facts)}",
            step=f"wait a second, then: keylane group describe {group.subject} {group.group}",
            partitions=free,
        )


def _last_end(facts: Facts) -> str:
    ended = facts.group.ended
    if ended is None or ended.left:
        return ""
    return f"; of the consumers whose leases ended, {_end_text(ended)}"


def _not_read(facts: Facts) -> Iterator[Cause]:
    """Partitions whose owners do not show up at the broker."""
    if _is_shared(facts):
        return
    for each in facts.progress:
        known = facts.statuses.get(each.partition_id)
        if (
            known is None
            or each.owner is None
            or not each.lag
            or each.holder == each.session
            or each.failing is not None
            or _waits_for_promise(each)
            or facts.unread_parents(each)
            or not _concerns(each, facts)
        ):
            continue
        yield Cause(
            code="not_read",
            text=f"consumer {each.owner} has the lease of partition {each.partition_id}, but has "
            f"not read it from broker group {each.broker_group} yet, or not within its ttl",
            step="look again in a second; then look at its log",
            partitions=(each.partition_id,),
        )


def _owned_by(facts: Facts, client: str) -> tuple[int, ...]:
    return tuple(each.partition_id for each in facts.progress if each.owner == client)


def _is_shared(facts: Facts) -> bool:
    return facts.group.strategy is ConsumeStrategy.SHARED


# ── messages that fail ────────────────────────────────────────────────────────────────────────────
def _failing(facts: Facts, *, hold_up: bool = True) -> Iterator[Cause]:
    """Failing messages that hold up those in question, or else those of other keys."""
    for each in facts.progress:
        failing = _failing_message(each, facts)
        if failing is not None and _holds_up(each, failing, facts) is hold_up:
            yield _failing_cause(each, failing, facts)


def _failing_message(progress: PartitionProgress, facts: Facts) -> FailingMessage | None:
    """Return the failing message of the key in question, if one is known, or else the oldest."""
    failing = progress.failing
    if failing is None or facts.key is None:
        return failing
    digest = key_digest(facts.key)
    return next((each for each in (failing, *failing.others) if each.key_digest == digest), failing)


def _holds_up(progress: PartitionProgress, failing: FailingMessage, facts: Facts) -> bool:
    """Return True if the messages in question wait for this one: it has their key, or it is in a
    sealed partition, which has to be read to its end.
    """
    is_sealed = progress.state is PartitionState.SEALED
    return facts.key is None or is_sealed or failing.key_digest == key_digest(facts.key)


def _is_held_up(progress: PartitionProgress, facts: Facts) -> bool:
    failing = _failing_message(progress, facts)
    return failing is not None and _holds_up(progress, failing, facts)


def _failing_cause(progress: PartitionProgress, failing: FailingMessage, facts: Facts) -> Cause:
    group, hangs = facts.group, failing.running_ms is not None
    source = progress.partition_id if failing.source is None else failing.source
    is_own = facts.key is not None and failing.key_digest == key_digest(facts.key)
    whose = "this key" if is_own else failing.key_digest
    place = f"offset {failing.offset} of partition {source} ({whose})"
    text = failing.text[:TEXT_CHARS_SHOWN]
    if hangs:
        sentence = (
            f"consumer {failing.client or progress.owner} has been handling {place} for at least "
            f"{format_age(failing.running_ms or 0)}: {text}"
        )
        step = "restart the consumer, and set a time limit for what its handler waits for"
    else:
        sentence = (
            f"the handler of {failing.client or progress.owner} has failed "
            f"{counted(failing.attempts, 'time')} with {place}, first "
            f"{_ago(failing.since_ms, facts)}; the last error was {failing.kind}"
            f"{f': {text}' if text else ''}"
        )
        policy = None if group.settings is None else group.settings.policy.on_failure
        step = "repair the handler"
        if policy in {None, FailurePolicy.BLOCK}:
            step += (
                f", or set the key aside: keylane group set {group.subject} {group.group} "
                "--on-failure park"
            )
        else:
            step += f"; the policy {policy} of the group applies after its last try"
    return Cause(
        code="handler_hangs" if hangs else "handler_fails",
        text=f"{sentence}; {_who_waits(progress, failing, facts)}"
        f"{_others_text(progress, failing, facts)}",
        step=step,
        partitions=(progress.partition_id,),
    )


def _who_waits(progress: PartitionProgress, failing: FailingMessage, facts: Facts) -> str:
    if progress.state is PartitionState.SEALED:
        return "the partitions that continue this one wait until it is handled"
    if _holds_up(progress, failing, facts):
        return "later messages of its key wait"
    text = "it has another key, for which this key does not wait"
    if failing.others_count == len(failing.others):
        return text
    return f"{text}; not every failing message is known, so this key may fail as well"


def _others_text(progress: PartitionProgress, failing: FailingMessage, facts: Facts) -> str:
    """Return how many other messages of the partition fail, and those that failed last."""
    oldest = progress.failing
    if oldest is None or not oldest.others_count:
        return ""
    known = sorted(
        (each for each in (oldest, *oldest.others) if each is not failing),
        key=lambda each: -each.at_ms,
    )
    count = oldest.others_count
    at_least = "at least " if count >= FAILING_COUNTED_MAX - 1 else ""
    texts = [
        f"offset {each.offset} of partition "
        f"{progress.partition_id if each.source is None else each.source} ({each.key_digest}), "
        f"{_ago(each.at_ms, facts)}, {_error_text(each)}"
        for each in known[:OTHERS_FAILING_MAX]
    ]
    fail = "fails or hangs" if count == 1 else "fail or hang"
    more = f"{at_least}{counted(count, 'more message')} of the partition {fail}"
    return f"; {more}, newest error first: {'; '.join(texts)}"


def _error_text(failing: FailingMessage) -> str:
    if failing.running_ms is not None:
        return f"hangs for {format_age(failing.running_ms)}"
    return f"{failing.kind}{failing.text and f': {failing.text[:OTHER_TEXT_CHARS_SHOWN]}'}"


def _suspects(facts: Facts) -> Iterator[Cause]:
    for each in facts.progress:
        if each.suspects:
            yield Cause(
                code="suspects",
                text=(
                    f"two consumers ended while they had {counted(each.suspects, 'message')} of "
                    f"partition {each.partition_id} in hand: these are handled one at a time"
                ),
                step="look at the logs of the consumers that ended",
                partitions=(each.partition_id,),
            )


def _parked(facts: Facts) -> Iterator[Cause]:
    """Parked keys; with a key in question, that one."""
    views = [each for each in facts.parked if _is_kept(each) and _is_in_question(each, facts)]
    if not views:
        return
    totals = _totals(views, facts)
    number, keys = sum(each.messages for each in totals), sum(each.keys for each in totals)
    since_ms = min(each.since_ms for each in totals)
    at_least = "at least " if facts.is_parked_partial else ""
    messages = f"{at_least}{counted(number, 'message')}"
    if any(each.is_dead for each in views):
        how = "given up" if all(each.is_dead for each in views) else "set aside"
        whose = "" if facts.key is None else " of the key"
        was = f"was {how}" if number == 1 else f"were {how}, the first"
        text = f"{messages}{whose} {was} {_ago(since_ms, facts)}"
    else:
        what = "the key has"
        if facts.key is None:
            what = f"{at_least}{counted(keys, 'key')} {'has' if keys == 1 else 'have'}"
        text = f"{what} been parked {_for(since_ms, facts)}, with {messages}"
    yield Cause(
        code="parked",
        text=f"{text}{_newest_failure(totals)}",
        step=f"repair the handler, then: {_redrive_command(views, facts)}",
        partitions=_numbers(views),
    )


def _redrive_command(views: Sequence[ParkedKeyView], facts: Facts) -> str:
    place = f"{facts.group.subject} {facts.group.group}"
    if facts.key is None and all(each.is_dead for each in views):
        return f"keylane dead retry {place}"
    return f"keylane parked redrive {place}{_key_option(facts) or ' --all-keys'}"


def _redriven(facts: Facts) -> Iterator[Cause]:
    """What was set aside, and is being handled again."""
    views = [
        each
        for each in facts.parked
        if each.state is ParkState.REDRIVING and (each.key is None or _is_in_question(each, facts))
    ]
    if not views:
        return
    is_all = not any(map(_is_kept, facts.parked))  # otherwise the totals are shown with the parked
    totals = _totals(views, facts) if is_all else [_totals_of(each) for each in views]
    messages = sum(each.messages for each in totals)
    what = counted(messages, "message")
    if any(each.key is None for each in views):
        what += " of any key" if facts.key is not None else ""
    elif facts.key is not None:
        what += " of the key"
    else:
        what += f" of {counted(sum(each.keys for each in totals), 'key')}"
    yield Cause(
        code="redriven",
        text=f"{what} {'is' if messages == 1 else 'are'} being handled again after a redrive"
        f"{_newest_failure(totals)}",
        step="wait; if they fail again, look at the handler's log",
        partitions=_numbers(views),
    )


def _is_kept(view: ParkedKeyView) -> bool:
    """Return True if messages stay set aside until an operator acts."""
    return view.tries is None and view.state is not ParkState.REDRIVING


def _totals(views: Sequence[ParkedKeyView], facts: Facts) -> list[ParkedTotals]:
    """Return the totals of each partition, where these are known, or else of the views."""
    counted_apart = [each for each in views if each.partition_id not in facts.parked_totals]
    return [*facts.parked_totals.values(), *map(_totals_of, counted_apart)]


def _totals_of(view: ParkedKeyView) -> ParkedTotals:
    return ParkedTotals(
        keys=1, messages=view.messages, since_ms=view.since_ms, failure=view.failure
    )


def _retried(facts: Facts) -> Iterator[Cause]:
    views = [
        each
        for each in facts.parked
        if each.tries is not None and each.state is not ParkState.REDRIVING
    ]
    if not views:
        return
    view = max(views, key=lambda each: each.tries or 0)
    text = (
        f"{counted(sum(each.messages for each in views), 'message')} of any key failed and will be "
        f"tried again{_next_of(view, facts.now_ms)}, after up to "
        f"{counted(view.tries or 0, 'failed try', 'failed tries')}{_newest_failure(views)}"
    )
    step = "repair the handler; it is tried again by itself"
    yield Cause(code="retried", text=text, step=step, partitions=_numbers(views))


def _dead_letters(facts: Facts) -> Iterator[Cause]:
    """Dead letters of any key, of which this key may have some."""
    group = facts.group
    views = [each for each in facts.parked if _is_kept(each) and not _is_in_question(each, facts)]
    if views:
        messages = sum(each.messages for each in views)
        yield Cause(
            code="dead_letters",
            text=f"group {group.group} has given up {counted(messages, 'message')} of any key, the "
            f"first {_ago(min(each.since_ms for each in views), facts)}"
            f"{_newest_failure(views)}",
            step="repair the handler, then, if this key has some of them: "
            f"keylane dead retry {group.subject} {group.group}{_key_option(facts)}",
            partitions=_numbers(views),
        )


def _is_in_question(view: ParkedKeyView, facts: Facts) -> bool:
    return facts.key is None or view.key == facts.key


def _numbers(views: Sequence[ParkedKeyView]) -> tuple[int, ...]:
    return tuple(sorted({each.partition_id for each in views}))


def _newest_failure(views: Sequence[ParkedKeyView | ParkedTotals]) -> str:
    failures = [each.failure for each in views if each.failure is not None]
    if not failures:
        return ""
    failure = max(failures, key=lambda each: each.at_ms)
    text = failure.text[:TEXT_CHARS_SHOWN]
    return (
        f"; the last error, after {counted(failure.attempts, 'try', 'tries')}, was {failure.kind}"
        f"{f': {text}' if text else ''}"
    )


def _next_of(view: ParkedKeyView, now_ms: int) -> str:
    return "" if view.next_ms is None else f" in {format_seconds(max(0, view.next_ms - now_ms))}"


# ── partitions ────────────────────────────────────────────────────────────────────────────────────
def _unread_parents(facts: Facts) -> Iterator[Cause]:
    """Partitions that are read only after what they continue."""
    group = facts.group
    children: dict[int, list[int]] = {}
    parents: dict[int, PartitionProgress] = {}
    for each in facts.progress:
        for parent in facts.unread_parents(each) if _concerns(each, facts) else ():
            children.setdefault(parent.partition_id, []).append(each.partition_id)
            parents[parent.partition_id] = parent
    for number, waiting in children.items():
        parent = parents[number]
        left = (
            "how many messages are left is not known"
            if parent.lag is None
            else f"{counted(parent.lag, 'message')} left"
        )
        where = "" if parent.offset is None else f", from offset {parent.offset} on"
        owner = "which no consumer has" if parent.owner is None else f"which {parent.owner} has"
        stored = next(
            (
                f"; the newest message of the key, at offset {each.offset} of partition "
                f"{each.partition_id}, was stored {format_age(each.age_ms)} ago"
                for each in map(facts.newest.get, reversed(waiting))
                if each is not None and each.offset is not None
            ),
            "",
        )
        ages_ms = [each.age_ms for each in facts.progress if each.partition_id in waiting]
        known_ms = [ms for ms in ages_ms if ms is not None]
        opened = f", opened {_ago(facts.now_ms - max(known_ms), facts)}," if known_ms else ""
        yield Cause(
            code="parent_unread",
            text=f"{numbered(waiting)}{opened} {'waits' if len(waiting) == 1 else 'wait'} until "
            f"partition {number}, {owner}, is read to its end: {left}{where}{stored}",
            step=f"keylane group describe {group.subject} {group.group} --all",
            partitions=tuple(waiting),
        )


def _operations(facts: Facts) -> Iterator[Cause]:
    yield from (waiting_operation(each) for each in facts.operations if each.problem)


def _behind(facts: Facts) -> Iterator[Cause]:
    """Partitions with messages that their owners have not acked, and that nothing holds up."""
    group = facts.group
    behind = [
        each
        for each in facts.progress
        if each.lag
        and (each.owner is not None or _is_shared(facts))
        and not _is_held_up(each, facts)
        and not facts.unread_parents(each)
        and _concerns(each, facts)
    ]
    if not behind:
        return
    stuck = [each for each in behind if _is_stuck(each, facts)]
    most = max(stuck or behind, key=lambda each: each.lag or 0)
    total = counted(sum(each.lag or 0 for each in behind), "message")
    what = f"{total} of partition {most.partition_id}"
    if len(behind) > 1:
        what = f"{total}, {most.lag} of them of partition {most.partition_id}"
    yield Cause(
        code="behind",
        text=f"group {group.group} has not acked {what}, from offset {most.offset} on"
        f"{_newest_place(most, facts)}; {_pace_text(most, facts)}",
        step=f"{_step_behind(most, facts)}: keylane group describe {group.subject} {group.group} "
        "shows how far it is",
        partitions=tuple(each.partition_id for each in behind),
    )


def _step_behind(progress: PartitionProgress, facts: Facts) -> str:
    pace, member = facts.paces.get(progress.partition_id), _member_of(progress, facts)
    if pace is not None and pace.acked:
        if _is_stuck(progress, facts):
            return "it needs more consumers, more partitions, or a faster handler"
        return "wait, nothing holds it up"
    step = f"look at the log and the process of {progress.owner or 'its consumers'}"
    if member is not None:
        step += f"; if it is dead, its lease ends in {format_seconds(member.expires_in_ms)}"
    return f"{step}; a slow handler needs more time, more consumers, or more partitions"


def _member_of(progress: PartitionProgress, facts: Facts) -> GroupMember | None:
    return next((each for each in facts.group.members if each.client == progress.owner), None)


def _is_stuck(progress: PartitionProgress, facts: Facts) -> bool:
    """Return True if a group makes no progress on a partition, as far as two looks can tell."""
    pace = facts.paces.get(progress.partition_id)
    if pace is None:
        return True
    return is_stuck(
        progress.lag or 0,
        falls_per_s=(pace.acked - pace.stored) * 1000 / pace.over_ms,
        oldest_ms=pace.oldest_ms,
    )


def _newest_place(progress: PartitionProgress, facts: Facts) -> str:
    newest = facts.newest.get(progress.partition_id)
    if newest is None or newest.offset is None:
        return ""
    return (
        f", the newest of the key at offset {newest.offset}, stored {format_age(newest.age_ms)} ago"
    )


def _pace_text(progress: PartitionProgress, facts: Facts) -> str:
    """Return what a group has done between two looks at a partition."""
    pace, member = facts.paces.get(progress.partition_id), _member_of(progress, facts)
    who = progress.owner or "its consumers"
    has = "has" if progress.owner else "have"
    if member is not None:
        who += f", last heard {format_seconds(member.heard_ms)} ago,"
    if pace is None:
        return f"{who} {has} them"
    if not pace.acked:
        oldest = f"; the oldest has waited for at least {format_age(pace.oldest_ms)}"
        known = facts.statuses.get(progress.partition_id)
        per_s = None if known is None else known.messages_per_s
        return (
            f"{who} {has} acked none within {format_seconds(pace.over_ms)}"
            f"{oldest if pace.oldest_ms else ''}"
            f"{f'; {format_rate(per_s)} a second arrive' if per_s else ''}: a handler is slow or "
            "has just begun, or the consumer is dead or cut off from broker group "
            f"{progress.broker_group}"
        )
    rate = f"{pace.acked * 1000 / pace.over_ms:.0f} a second are acked"
    if pace.acked <= pace.stored:
        return f"{rate}, {pace.stored * 1000 / pace.over_ms:.0f} a second arrive: it stays behind"
    left_ms = (progress.lag or 0) * pace.over_ms // (pace.acked - pace.stored)
    return f"{rate}: at this rate it has caught up in {format_age(left_ms)}"


def _concerns(progress: PartitionProgress, facts: Facts) -> bool:
    """Return False if it is certain that a partition has no unacked message of the key in
    question.
    """
    newest = facts.newest.get(progress.partition_id)
    if facts.key is None or newest is None:
        return True
    if newest.offset is None:
        return progress.offset is None or newest.searched_from > progress.offset
    return newest.acked is not True


# ── messages that are gone, or were never there ───────────────────────────────────────────────────
def _lost(facts: Facts) -> Iterator[Cause]:
    group = facts.group
    removed = [each for each in facts.progress if each.removed_unread]
    if removed:
        total = sum(each.removed_unread or 0 for each in removed)
        yield Cause(
            code="removed_unread",
            text=f"retention has removed {counted(total, 'message')} of "
            f"{numbered(each.partition_id for each in removed)} before {group.group} had read them",
            step=f"to keep unread messages: keylane subject set {group.subject} --retention acked",
            partitions=tuple(each.partition_id for each in removed),
        )
    numbers = {each.partition_id for each in facts.partitions}
    given_up = [
        each for each in group.given_up if facts.key is None or each.partition_id in numbers
    ]
    if given_up:
        yield Cause(
            code="given_up",
            text=f"an operator has given up {counted(len(given_up), 'partition')} that "
            f"{group.group} had not read to the end",
            step=f"keylane group describe {group.subject} {group.group} --all",
            partitions=tuple(each.partition_id for each in given_up),
        )


def _filtered(facts: Facts) -> Iterator[Cause]:
    """A key whose newest message was acked by a group that leaves some out."""
    group = facts.group
    texts = sorted({each.filter for each in group.members if each.filter})
    for number, newest in facts.newest.items():
        if facts.key is None or not newest.acked or not texts:
            continue
        place = f"offset {newest.offset} of partition {number}"
        has = f"has the tags {', '.join(newest.tags)}" if newest.tags else "has no tags"
        if _leaves_out(texts[0], newest.tags):
            text = (
                f"the newest message of the key, at {place}, {has}, and {group.group} leaves it "
                f"out: it handles only {texts[0]}"
            )
        else:
            text = (
                f"the newest message of the key, at {place}, is acked: {group.group} has handled "
                f"it or left it out, because it handles only {texts[0]}; it {has}"
            )
        yield Cause(
            code="filtered_out",
            text=text,
            step="compare the tags and the filter in the consumer's settings with the message",
            partitions=(number,),
        )


def _leaves_out(filter_text: str, tags: Iterable[str]) -> bool:
    """Return True if it is certain that a filter with this text leaves out a message."""
    first, _, _ = filter_text.partition("; ")
    if not first.startswith("tags ") or "…" in filter_text:
        return False
    return not set(first.removeprefix("tags ").split(", ")).intersection(tags)


def _scheduled(facts: Facts) -> Iterator[Cause]:
    messages = [each for page in facts.scheduled for each in page.messages]
    total = sum(page.count for page in facts.scheduled)
    if not messages:
        return
    first = min(messages, key=lambda each: each.deliver_at_ms)
    left_ms = first.deliver_at_ms - facts.now_ms
    when = f"was due {_ago(first.deliver_at_ms, facts)}"
    if left_ms > 0:
        moment = format_moment(first.deliver_at_ms, facts.now_ms)
        when = f"comes in {format_age(left_ms)} (at {moment})"
    drop = f"; it will be dropped: {first.drop}" if first.drop else ""
    yield Cause(
        code="scheduled_late" if left_ms < -LATE_MS else "scheduled",
        text=f"{counted(total, 'message')} of {facts.group.subject} "
        f"{'waits for its' if total == 1 else 'wait for their'} delivery time; the first "
        f"{when}{drop}",
        step=f"keylane scheduled list --subject {facts.group.subject}",
    )


def _not_stored(facts: Facts) -> Iterator[Cause]:
    """Partitions without any message in question."""
    step = "look at the producer: await each receipt; producer.waiting() says what it waits for"
    known = [each for each in facts.progress if each.next_offset is not None]
    if not known or len(known) < len(facts.progress):
        return
    numbers = tuple(each.partition_id for each in known)
    if not any(each.next_offset for each in known):
        yield Cause(
            code="nothing_stored",
            text=f"nothing was ever stored in {numbered(numbers)}"
            f"{', where the key belongs' if facts.key is not None else ''}",
            step=step,
            partitions=numbers,
        )
        return
    searches = [facts.newest[each] for each in numbers if each in facts.newest]
    if facts.key is None or len(searches) < len(numbers):
        return
    if any(each.offset is not None for each in searches):
        return
    searched = sum(each.next_offset - each.searched_from for each in searches)
    is_complete = all(each.searched_from == each.first_offset for each in searches)
    removed = sum(each.first_offset for each in searches)
    text = f"no message of the key is stored in {numbered(numbers)}, where the key belongs"
    if not is_complete:
        text += f", among the newest {counted(searched, 'message')}"
    if removed:
        text += f"; retention has removed the {counted(removed, 'message')} before these"
    yield Cause(
        code="key_not_stored",
        text=text,
        step=step,
        partitions=numbers,
    )


def _clocks(facts: Facts) -> Iterator[Cause]:
    step = "set the clocks right, and keep them so with NTP"
    for name, ahead_ms in facts.clocks_ms.items():
        if abs(ahead_ms) > CLOCK_MS:
            yield Cause(
                code="clock",
                text=f"the clock of broker group {name} is {format_age(abs(ahead_ms))} "
                f"{'ahead of' if ahead_ms > 0 else 'behind'} that of the machine that asks: ages, "
                "times of reads, and delivery times of scheduled messages are off by that",
                step=step,
                partitions=facts.partitions_on(name),
            )
    for name, health in facts.health.items():
        scheduled = health.details.get("scheduled")
        problem = scheduled.get("calendar") if isinstance(scheduled, dict) else ""
        if problem:
            yield Cause(
                code="clock",
                text=f"broker group {name} does not trust its clock: {problem}",
                step=step,
                partitions=facts.partitions_on(name),
            )
    for each in facts.progress:
        failing = each.failing
        if failing is not None and failing.at_ms > facts.now_ms + CLOCK_MS:
            ahead = format_age(failing.at_ms - facts.now_ms)
            yield Cause(
                code="clock",
                text=f"the clock of {failing.client} is at least {ahead} ahead of that of the "
                "machine that asks",
                step=step,
                partitions=(each.partition_id,),
            )


def _is_handled(facts: Facts) -> bool:
    """Return True if the group has acked the newest message of the key in question."""
    if facts.key is None or any(
        failing.key_digest == key_digest(facts.key)
        for failing in (_failing_message(each, facts) for each in facts.progress)
        if failing is not None
    ):
        return False
    for number in sorted((each.partition_id for each in facts.partitions), reverse=True):
        newest = facts.newest.get(number)
        if newest is None or newest.offset is not None:  # older messages are in its parents
            return newest is not None and newest.acked is True
    return False


def _nothing_wrong(facts: Facts) -> Cause:
    group = facts.group
    found = [(n, each) for n, each in facts.newest.items() if each.offset is not None]
    unknown = [each.partition_id for each in facts.progress if each.lag is None]
    if unknown and not _is_handled(facts):
        return Cause(
            code="unknown",
            text=f"it is not known how far {group.group} is in {numbered(unknown)}",
            step="keylane broker list",
            partitions=tuple(unknown),
        )
    what, where = f"everything that is stored in {group.subject}", ""
    if facts.key is not None:
        what = "everything that is stored where the key belongs"
    if facts.key is not None and found:
        number, newest = max(found, key=lambda each: each[0])
        what = "the newest message of the key"
        stored = _ago(facts.now_ms - newest.age_ms, facts)
        where = f", at offset {newest.offset} of partition {number}, stored {stored}"
    filters = sorted({each.filter for each in group.members if each.filter})
    only = f"; it handles only {filters[0]}" if filters else ""
    start = None if group.settings is None else group.settings.start
    began = "" if start is None or str(start) == "earliest" else f"; it began at {start}"
    return Cause(
        code="all_acked",
        text=f"group {group.group} has acked {what}{where}{only}{began}; a message that its "
        "handler did not see was left out by a filter, was skipped, is older than the group, or "
        "was never stored",
        step=f"keylane read {group.subject}{_key_option(facts) or ' --from -10m'} shows what "
        "is stored; compare it with the tags and the filter in the consumer's settings",
        partitions=tuple(each.partition_id for each in facts.progress),
    )


def _ago(time_ms: int, facts: Facts) -> str:
    """Return how long ago a time was, with the time: "9 min ago (12:03:04 UTC)"."""
    moment, age_ms = format_moment(time_ms, facts.now_ms), facts.now_ms - time_ms
    return f"{format_age(age_ms)} ago ({moment})" if age_ms >= 0 else f"at {moment}"


def _for(since_ms: int, facts: Facts) -> str:
    """Return for how long something has been so: "for 9 min (since 12:03:04 UTC)"."""
    since, age_ms = f"since {format_moment(since_ms, facts.now_ms)}", facts.now_ms - since_ms
    return f"for {format_age(age_ms)} ({since})" if age_ms >= 0 else since


def _lasting(ms: int | None, facts: Facts) -> str:
    """Return for how long something has been so: " for 9 min (since 12:03:04 UTC)"; "" if that is
    not known.
    """
    return "" if ms is None else f" {_for(facts.now_ms - ms, facts)}"


def _key_option(facts: Facts) -> str:
    """Return the option of a command that names the key; "" if no key is in question."""
    if facts.key is None:
        return ""
    text = facts.key.decode(errors="replace")
    return f" --key {text}" if _PLAIN_WORD.fullmatch(text) else f" --key-hex {facts.key.hex()}"


def _shell_word(text: str) -> str:
    """Return a name as a shell takes it, with quotes if it needs them."""
    quoted = text.replace("'", "'\"'\"'")
    return text if _PLAIN_WORD.fullmatch(text) else f"'{quoted}'"


RULES: tuple[Callable[[Facts], Iterator[Cause]], ...] = (
    _suspended,
    _reset,
    _no_consumer,
    _silent_everywhere,
    _unheard_owners,
    _silent_awaited,
    _cut_off,
    _refusing,
    _damaged,
    _waiting_producers,
    _failing,
    _suspects,
    _parked,
    _redriven,
    _retried,
    _promised,
    _not_granted,
    _hand_over,
    _unowned,
    _unread_parents,
    _operations,
    _silent_in_part,
    _over_quota,
    _not_read,
    _behind,
    _lost,
    _filtered,
    _not_stored,
    _scheduled,
    _dead_letters,
    partial(_failing, hold_up=False),
    _clocks,
)
"""The order in which they are listed."""
_SET_ASIDE = frozenset({"filtered_out", "parked", "redriven", "retried"})
"""Codes of causes that say how the newest message of a key was acked without being handled."""
_MAY_BE_NEWER = frozenset(
    {"producer_waits", "broker_refuses", "no_copy", "over_quota", "dead_letters"}
)
"""Codes of causes that may hold up a message of the key that is newer than the newest acked one, or
that may be the reason why that was acked.
"""
_ASIDE = frozenset({"clock", "dead_letters"})
"""Codes of causes beside which something else may be wrong."""
