"""Says what is wrong with brokers and operations, in the one sentence that users see. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from ...protocol.membership.views import BrokerView, RefusedBroker
from ...protocol.operations import OperationView
from ...protocol.text import format_age, format_time, listed
from ...protocol.why import Cause
from ..views import BrokerList

UNHEARD = frozenset({"broker_silent", "broker_hangs", "broker_gone", "no_take_over"})
"""The codes of causes that are over as soon as the broker is heard again."""
NOT_WRONG = frozenset({"all_acked", "nothing_stored", "scheduled"})
"""The codes of causes that only say why there is nothing to do yet."""


def numbered(partitions: Iterable[int], otherwise: str = "") -> str:
    """Return partitions as text, such as "partition 1"; `otherwise` if there are none."""
    numbers = tuple(partitions)
    if not numbers:
        return otherwise
    return f"partition{'' if len(numbers) == 1 else 's'} {listed(numbers)}"


def server_causes(
    brokers: BrokerList, hanging: Collection[str] = ()
) -> Iterator[tuple[str, Cause]]:
    """
    Yield what is wrong with brokers as the metaserver knows them, each with the broker group.

    Args:
        hanging: the silent broker groups that hang; see `Admin.find_hanging`.
    """
    for broker in brokers.brokers:
        name = broker.broker_group
        if not broker.available:
            yield name, silent_broker(broker, accepts=name in hanging)
            if (cause := no_take_over(broker)) is not None:
                yield name, cause
        elif not broker.writable:
            yield name, refusing_broker(broker, broker.problem)
        if broker.quarantine:
            yield name, quarantined_copies(broker)
        elif broker.folders < broker.folders_wanted:
            yield name, too_few_folders(broker)
    for refused in brokers.refused:
        yield refused.broker_group, refused_broker(refused)


def silent_broker(
    broker: BrokerView, partitions: Sequence[int] = (), *, accepts: bool = False
) -> Cause:
    """
    Return the cause for a broker that the metaserver has not heard from within its ttl.

    Args:
        partitions: the partitions in question; (): all of the broker.
        accepts: True if something accepts connections at its address.
    """
    still, step = "", f"start the broker at {broker.address} again; keylane broker list"
    if accepts:
        still = f", but something still accepts connections at {broker.address}"
        step = f"end the process at {broker.address}, which hangs; then start the broker again"
    effect = "no partition is on it"
    if partitions or broker.has_partitions:
        effect = (
            f"messages for {numbered(partitions, 'its partitions')} wait at their producers, and "
            "nobody gets those that are stored there"
        )
    if broker.quarantine:
        effect += f". No copy takes its place: {broker.quarantine}"
    return Cause(
        code="broker_silent",
        text=f"broker group {broker.broker_group} has been silent for "
        f"{format_age(broker.silent_ms)}{still}: {effect}",
        step=step,
        partitions=tuple(partitions),
    )


def no_take_over(broker: BrokerView, partitions: Sequence[int] = ()) -> Cause | None:
    """Return the cause for a broker that is gone, and whose place no copy has taken; None if it has
    no copies, or they are in quarantine, which the cause of the broker says.
    """
    if broker.quarantine:
        return None
    name = broker.broker_group
    step = (
        f"start the broker at {broker.address} again; if its folder is lost for good, and what the "
        "copy lacks may be lost too: keylane broker promote DIR"
    )
    if broker.promoted:
        text = f"copy {broker.promoted} got the place of broker group {name}, and serves nobody yet"
        step = "look at the log and the process of this copy; keylane broker list"
    elif broker.refused_copies:
        text = f"no copy takes the place of broker group {name}: " + "; ".join(
            f"copy {copy_id} was refused, because {problem}"
            for copy_id, problem in sorted(broker.refused_copies.items())
        )
    elif broker.copies:
        one = len(broker.copies) == 1
        text = (
            f"{'copy' if one else 'copies'} {listed(broker.copies)} of broker group {name} "
            f"{'has' if one else 'have'} everything that was acked, and "
            f"{'does not ask' if one else 'do not ask'} for its place: not running, cut off from "
            "the metaservers, or without failover"
        )
        step = "start it with --failover true; or stop it, then: keylane broker promote DIR"
    elif broker.folders_wanted > 1:
        text = (
            f"no copy takes the place of broker group {name}: acks waited for none when it was "
            "last heard, so each may lack acked messages"
        )
    else:
        return None
    return Cause(code="no_take_over", text=text, step=step, partitions=tuple(partitions))


def unheard_broker(
    name: str,
    why: str,
    broker: BrokerView | None,
    partitions: Sequence[int] = (),
    *,
    accepts: bool = True,
) -> Cause:
    """
    Return the cause for a broker that does not answer, although its ttl has not passed.

    Args:
        why: what it does, such as "has not answered within 0.6 s".
        broker: the metaserver's view of it; None if that is not known.
        partitions: the partitions in question; (): all of the broker.
        accepts: False if nothing accepts connections at its address.
    """
    heard = address = ""
    if broker is not None:
        heard = f", although the metaserver heard from it {format_age(broker.silent_ms)} ago"
        address = f" at {broker.address}"
    if accepts:
        condition, step = "if it hangs, ", f"look at the process and the log of the broker{address}"
    else:
        condition, step = "", f"start the broker{address} again; keylane broker list"
    return Cause(
        code="broker_hangs" if accepts else "broker_gone",
        text=f"broker group {name} {why}{heard}: {condition}nothing is stored in "
        f"{numbered(partitions, 'its partitions')}, and nobody gets what is stored there",
        step=step,
        partitions=tuple(partitions),
    )


def refusing_broker(
    broker: BrokerView,
    reason: str,
    partitions: Sequence[int] = (),
    *,
    waits_for_copies: bool = False,
) -> Cause:
    """Return the cause for a broker that takes no messages."""
    name, where = broker.broker_group, numbered(partitions, "its partitions")
    lasts = "" if broker.refusing_ms is None else f" for {format_age(broker.refusing_ms)}"
    if waits_for_copies:
        acks = f"has acked nothing{lasts}" if lasts else "acks nothing"
        return Cause(
            code="no_copy",
            text=f"broker group {name} {acks}: {reason}; "
            f"messages for {where} are not stored before that",
            step=f"start its copies again; keylane broker copies {name}",
            partitions=tuple(partitions),
        )
    takes = f"has taken no messages{lasts}" if lasts else "takes no messages"
    return Cause(
        code="broker_refuses",
        text=f"broker group {name} {takes}{reason and f': {reason}'}; those for {where} wait at "
        "their producers",
        step=f"keylane broker health {broker.address}",
        partitions=tuple(partitions),
    )


def too_few_folders(broker: BrokerView) -> Cause:
    """Return the cause for a broker group that lacks copies of its data folder."""
    return Cause(
        code="too_few_folders",
        text=f"broker group {broker.broker_group} has {broker.folders} of {broker.folders_wanted} "
        "data folders that have everything",
        step=f"keylane broker copies {broker.broker_group}",
    )


def quarantined_copies(broker: BrokerView) -> Cause:
    """Return the cause for a broker group whose broker no copy replaces, because the metaservers'
    database fell back.
    """
    return Cause(
        code="copies_quarantined",
        text=f"no copy takes the place of the broker of group {broker.broker_group}, and its set "
        f"does not change: {broker.quarantine}",
        step=f"keylane broker copies {broker.broker_group}",
    )


def refused_broker(refused: RefusedBroker) -> Cause:
    """Return the cause for a broker whose reports are refused."""
    return Cause(
        code="broker_refused",
        text=f"the broker at {refused.address} may not serve broker group {refused.broker_group}: "
        f"{refused.problem}",
        step=refused.advice or f"keylane broker accept {refused.broker_group} --dry-run",
    )


def waiting_operation(operation: OperationView) -> Cause:
    """Return the cause for an operation that waits, as its `problem` says."""
    since = operation.waiting_since_ms
    return Cause(
        code="operation_waits",
        text=f"operation {operation.operation_id} ({operation.kind}) on {operation.subject} waits"
        f"{'' if since is None else f' since {format_time(since)}'}: {operation.problem}",
        step=f"keylane subject operations {operation.subject}",
        partitions=operation.sealed,
    )
