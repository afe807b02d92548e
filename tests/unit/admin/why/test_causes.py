"""Causes from facts: which partitions concern a key, and texts with anything in them."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies
from msgspec.structs import replace

from keylane.admin import ParkedKeyView
from keylane.admin.why.causes import explain
from keylane.admin.why.facts import Facts, LagPace, partitions_of_key
from keylane.admin.why.lag import STUCK_MS
from keylane.protocol.control import (
    BrokerView,
    EndedMember,
    GroupMember,
    GroupStatus,
    WaitingProducer,
)
from keylane.protocol.groups import FailurePolicy, GroupPolicy, GroupSettings
from keylane.protocol.parked import (
    FAILING_COUNTED_MAX,
    FailingMessage,
    Failure,
    ParkedTotals,
    ParkState,
)
from keylane.protocol.progress import PendingReset, ResetTo
from keylane.protocol.reading.newest import NewestMessage
from keylane.protocol.routing import (
    LOGICAL_PARTITIONS,
    PartitionState,
    logical_partition,
)
from keylane.protocol.scheduled.receipt import ScheduledPage, ScheduledView
from keylane.protocol.text import key_digest, printable
from support.why_facts import (
    FAILING,
    WHOLE,
    broker,
    facts,
    health,
    newest,
    parked_key,
    partition,
    progress,
    read,
    status,
)


def codes(given: Facts) -> list[str]:
    return [cause.code for cause in explain(given).causes]


def test_partitions_of_a_key_are_those_whose_ranges_have_it():
    half = LOGICAL_PARTITIONS // 2
    parent = partition(1, 0, LOGICAL_PARTITIONS)
    low, high = partition(2, 0, half, 1), partition(3, half, LOGICAL_PARTITIONS, 1)
    key = next(key for key in (b"%d" % n for n in range(99)) if logical_partition(key) >= half)
    assert partitions_of_key([parent, low, high], key) == [parent, high]


def test_child_waits_for_a_grandparent_that_is_not_read():
    first, child, grandchild = (
        partition(1, 0, 1024),
        partition(2, 0, 1024, 1),
        partition(3, 0, 1024, 2),
    )
    sealed = progress(1, state=PartitionState.SEALED)
    read = progress(2, state=PartitionState.SEALED, lag=0)
    given = facts(first, child, grandchild, progress_of=(sealed, read, progress(3, owner=None)))
    [waits] = [cause for cause in explain(given).causes if cause.code == "parent_unread"]
    assert waits.partitions == (2, 3)
    assert "until partition 1, which c1 has, is read" in waits.text


def test_message_that_waits_for_a_parent_is_named_with_its_place():
    sealed = progress(1, state=PartitionState.SEALED)
    newest = NewestMessage(
        partition_id=2, searched_from=0, first_offset=0, next_offset=10, offset=7, age_ms=5_000
    )
    given = facts(
        partition(1, 0, 1024),
        partition(2, 0, 1024, 1),
        progress_of=(sealed, progress(2)),
        key=b"a",
        newest={2: newest},
    )
    [waits] = [cause for cause in explain(given).causes if cause.code == "parent_unread"]
    assert waits.text.endswith(
        "; the newest message of the key, at offset 7 of partition 2, was stored 5.0 s ago"
    )


def test_most_likely_cause_comes_first_when_several_hold():
    """A broker that is silent explains more than a handler that was seen failing before."""
    silent = BrokerView(broker_group="g1", address="h:1", available=False, silent_ms=9_000)
    given = facts(partition(1, 0, 1024), progress_of=(progress(1),), brokers=(silent,))
    assert codes(given) == ["broker_silent", "behind"]


def test_text_of_users_cannot_move_the_cursor_of_a_terminal():
    given = facts(partition(1, 0, 1024), progress_of=(progress(1),))
    ended = EndedMember(client="evil\x1b[2J\n", left=False, ended_ms=5_000)
    given = replace(given, group=replace(given.group, sessions=0, ended=ended))
    [first, *_] = explain(given).causes
    assert first.code == "no_consumer"
    assert "\x1b" not in first.text
    assert "\n" not in first.text


@pytest.mark.parametrize(
    ("ended", "token", "text", "step"),
    [
        (
            EndedMember(client="vm:1", left=False, ended_ms=3_000),
            1,
            (
                "no consumer of billing is heard: the leases of the last one, vm:1, ended 3.0 s ago, "
                "because it had sent no heartbeat for its ttl: it is dead, cut off, or its event loop "
                "is blocked"
            ),
            (
                "look whether its process still runs, and at its log; if it has ended, start a "
                "consumer of orders in the group billing"
            ),
        ),
        (
            EndedMember(client="vm:1", left=False, ended_ms=3_000, heard_ms=33_000),
            1,
            (
                "no consumer of billing is heard: the last one, vm:1, was last heard 33 s ago, and "
                "its leases ended 3.0 s ago: it is dead, cut off, or its event loop is blocked"
            ),
            (
                "look whether its process still runs, and at its log; if it has ended, start a "
                "consumer of orders in the group billing"
            ),
        ),
        (
            EndedMember(client="vm:1", left=True, ended_ms=3_000),
            1,
            "no consumer of billing runs: the last one, vm:1, left 3.0 s ago",
            "start a consumer of orders in the group billing",
        ),
        (
            None,
            1,
            "no consumer of billing has sent a heartbeat for 12 s",
            "start a consumer of orders in the group billing",
        ),
        (
            None,
            0,
            "no consumer has joined group billing yet",
            (
                "start a consumer of orders in the group billing, such as: keylane consume orders "
                "--group billing; keylane group list orders shows whether its name is spelled "
                "otherwise"
            ),
        ),
    ],
)
def test_group_without_consumers_is_told_with_what_became_of_the_last_one(
    ended: EndedMember | None, token: int, text: str, step: str
):
    given = facts(WHOLE, progress_of=(progress(1, owner=None, session=None, token=token),))
    alone = replace(given.group, sessions=0, ended=ended, silent_ms=12_000)
    [cause, *_] = explain(replace(given, group=alone)).causes
    assert (cause.code, cause.text, cause.step) == ("no_consumer", text, step)


def test_lag_that_is_not_known_is_said_to_be_unknown():
    given = facts(
        partition(1, 0, 1024),
        progress_of=(progress(1, lag=None, next_offset=None, problem="it hangs"),),
        unknown=("it hangs",),
    )
    found = explain(given)
    assert [cause.code for cause in found.causes] == ["unknown"]
    assert found.unknown == ("it hangs",)


# ── what servers know of themselves ───────────────────────────────────────────────────────────────
def test_broker_that_hangs_comes_first_when_it_has_all_messages_in_question():
    given = facts(
        WHOLE,
        progress_of=(progress(1, lag=None, next_offset=None, offset=None),),
        brokers=(broker(),),
        silent={"g1": "has not answered within 0.6 s"},
    )
    [hangs] = explain(given).causes
    assert hangs.code == "broker_hangs"
    assert hangs.text == (
        "broker group g1 has not answered within 0.6 s, although the metaserver heard from it "
        "0.2 s ago: if it hangs, nothing is stored in partition 1, and nobody gets what is stored "
        "there"
    )


def test_broker_that_hangs_comes_after_a_handler_that_fails_at_another():
    low, high = partition(1, 0, 512), partition(2, 512, 1024)
    failing = FailingMessage(
        offset=3,
        key_digest="key digest ab",
        since_ms=1_000,
        attempts=2,
        kind="ValueError",
        text="",
        client="c1",
        at_ms=2_000,
    )
    given = facts(
        low,
        replace(high, broker_group="g2"),
        progress_of=(
            progress(1, failing=failing),
            progress(2, broker_group="g2", lag=None, next_offset=None),
        ),
        brokers=(broker(), broker("g2")),
        silent={"g2": "has not answered within 0.6 s"},
    )
    assert codes(given) == ["handler_fails", "broker_hangs"]
    [fails, hangs] = explain(given).causes
    assert fails.text.endswith("the last error was ValueError; later messages of its key wait")
    assert hangs.partitions == (2,)


def test_broker_that_is_gone_comes_before_the_clients_that_wait_for_it():
    low, high = partition(1, 0, 512), replace(partition(2, 512, 1024), broker_group="g2")
    member = GroupMember(
        client="c2", partitions=0, heard_ms=100, expires_in_ms=29_000, unreached=("g2",)
    )
    waits = WaitingProducer(
        client="vm:1", broker_group="g2", messages=1, waiting_ms=900, reason="connection refused"
    )
    given = facts(
        low,
        high,
        progress_of=(read(1), progress(2, broker_group="g2", lag=None, next_offset=None)),
        brokers=(broker(), broker("g2", address="h:2")),
        silent={"g2": "does not answer: cannot reach h:2: connection refused"},
        accepts={"g2": False},
    )
    for clients in ({"waiting_producers": (waits,)}, {"members": (member,)}):
        [cause] = explain(replace(given, group=replace(given.group, **clients))).causes
        assert cause.code == "broker_gone"
        assert cause.step == "start the broker at h:2 again; keylane broker list"
    failing = (progress(1, failing=FAILING), given.progress[1])
    unawaited = replace(given, group=replace(given.group, partitions=failing))
    assert codes(unawaited) == ["handler_fails", "broker_gone"]


@pytest.mark.parametrize(
    ("accepts", "still", "step"),
    [
        (False, "9.0 s: messages", "start the broker at h:1 again; keylane broker list"),
        (
            True,
            "9.0 s, but something still accepts connections at h:1: messages",
            "end the process at h:1, which hangs; then start the broker again",
        ),
    ],
)
def test_step_for_a_silent_broker_ends_a_process_that_still_accepts_connections(
    accepts: bool, still: str, step: str
):
    given = facts(
        WHOLE,
        progress_of=(progress(1, lag=None, next_offset=None),),
        brokers=(broker(available=False, silent_ms=9_000),),
        accepts={"g1": accepts},
    )
    [cause] = explain(given).causes
    assert cause.code == "broker_silent"
    assert still in cause.text
    assert cause.step == step


def test_broker_whose_acks_wait_for_copies_is_named_with_them():
    waits = "acks wait for copies (c1), and no metaserver has left them out"
    given = facts(
        WHOLE,
        progress_of=(read(1),),
        brokers=(broker(),),
        health={"g1": health(ready=False, reason=waits, waits_for_copies=waits)},
    )
    [cause] = explain(given).causes
    assert cause.code == "no_copy"
    assert waits in cause.text
    assert cause.step == "start its copies again; keylane broker copies g1"


def test_broker_that_takes_messages_again_is_not_blamed_for_an_older_report():
    given = facts(
        WHOLE,
        progress_of=(read(1),),
        brokers=(broker(writable=False, problem="the disk is full"),),
        health={"g1": health()},
    )
    assert codes(given) == ["all_acked"]
    assert codes(replace(given, health={})) == ["broker_refuses"]


def test_partition_that_has_lost_messages_is_named_and_not_that_of_another():
    lines = [f"partition {number} has lost its offsets from 3 to 5" for number in (1, 11)]
    given = facts(WHOLE, progress_of=(read(1),), health={"g1": health(damage=lines)})
    [cause] = explain(given).causes
    assert cause.code == "log_damaged"
    assert cause.text == (
        "the log of broker group g1 is damaged: partition 1 has lost its offsets from 3 to 5"
    )


def test_quota_is_named_with_the_limit_and_the_wait():
    given = facts(
        WHOLE,
        progress_of=(read(1),),
        statuses={
            1: status(
                1, limited_by="bytes of principal 'shop'", limited_ms=1_200, limited_for_ms=3_000
            )
        },
        now_ms=60_000,
    )
    [cause] = explain(given).causes
    assert cause.code == "over_quota"
    assert cause.text == (
        "calls about orders wait for a quota, the limit of bytes of principal 'shop': 1.2 s now, "
        "again and again for 3.0 s (since 00:00:57 UTC)"
    )


@pytest.mark.parametrize(("ahead_ms", "side"), [(7_200_000, "ahead of"), (-7_200_000, "behind")])
def test_clock_that_is_off_is_named_beside_what_else_is_known(ahead_ms: int, side: str):
    given = facts(WHOLE, progress_of=(read(1),), clocks_ms={"g1": ahead_ms})
    assert codes(given) == ["clock", "all_acked"]
    assert f"the clock of broker group g1 is 2 h {side} that" in explain(given).causes[0].text
    assert codes(replace(given, clocks_ms={"g1": ahead_ms // 10_000})) == ["all_acked"]


def test_clock_that_a_broker_does_not_trust_is_named():
    given = facts(
        WHOLE,
        progress_of=(read(1),),
        health={"g1": health(scheduled={"calendar": "the calendar was set forward by 3.0 hours"})},
    )
    assert codes(given) == ["clock", "all_acked"]


def test_clock_of_a_consumer_that_is_ahead_is_named():
    failing = FailingMessage(
        offset=3,
        key_digest="key digest ab",
        since_ms=100_000,
        attempts=2,
        kind="ValueError",
        text="no",
        client="c1",
        at_ms=100_000,
    )
    given = facts(WHOLE, progress_of=(progress(1, failing=failing),), now_ms=40_000)
    assert codes(given) == ["handler_fails", "clock"]


def suspended(**since: int) -> dict[str, object]:
    return {"settings": GroupSettings(subject="orders", group="billing", suspended=True, **since)}


def clients_suspended(**since: int) -> dict[str, object]:
    member = GroupMember(client="c1", partitions=1, heard_ms=9, expires_in_ms=9_000, suspended=True)
    settings = GroupSettings(subject="orders", group="billing", suspended_clients=("c1",), **since)
    return {"settings": settings, "members": (member,)}


def cut_off(**since: tuple[int, ...]) -> dict[str, object]:
    member = GroupMember(
        client="c1", partitions=1, heard_ms=9, expires_in_ms=9_000, unreached=("g1",), **since
    )
    return {"members": (member,)}


def reset(**since: int) -> dict[str, object]:
    return {"reset": PendingReset(to=ResetTo.LATEST, begun=True, **since)}


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (suspended(), "an operator has suspended billing: its consumers get nothing"),
        (
            suspended(suspended_ms=9_000),
            "an operator suspended billing 9.0 s ago (00:00:51 UTC): its consumers get nothing",
        ),
        (
            clients_suspended(),
            "an operator has suspended every running consumer of billing: c1",
        ),
        (
            clients_suspended(clients_suspended_ms=9_000),
            "an operator suspended every running consumer of billing 9.0 s ago (00:00:51 UTC): c1",
        ),
        (
            cut_off(),
            (
                "consumer c1 cannot connect to broker group g1, which the cluster still reports alive: "
                "it gets nothing of partition 1"
            ),
        ),
        (
            cut_off(unreached_ms=(9_000,)),
            (
                "consumer c1 cannot connect to broker group g1, which the cluster still reports alive: "
                "it has got nothing of partition 1 for 9.0 s (since 00:00:51 UTC)"
            ),
        ),
        (
            reset(),
            (
                "a reset of billing to latest is under way, and no partition is granted meanwhile: its "
                "cursors are being set"
            ),
        ),
        (
            reset(asked_ms=9_000),
            (
                "a reset of billing to latest, asked for 9.0 s ago (00:00:51 UTC), is under way, and no "
                "partition is granted meanwhile: its cursors are being set"
            ),
        ),
    ],
)
def test_cause_says_since_when_it_holds_if_a_server_knows(group: dict[str, object], text: str):
    given = facts(WHOLE, progress_of=(progress(1),), brokers=(broker(),), now_ms=60_000)
    given = replace(given, group=replace(given.group, **group))
    assert explain(given).causes[0].text == text


@pytest.mark.parametrize(
    ("details", "known", "unknown"),
    [
        (
            {},
            "broker group g1 has taken no messages for 9.0 s: the disk is full;",
            "broker group g1 takes no messages: the disk is full;",
        ),
        (
            {"waits_for_copies": "the disk is full"},
            "broker group g1 has acked nothing for 9.0 s: the disk is full;",
            "broker group g1 acks nothing: the disk is full;",
        ),
    ],
)
def test_broker_that_refuses_is_named_with_the_time_since_then(
    details: dict[str, object], known: str, unknown: str
):
    given = facts(
        WHOLE,
        progress_of=(read(1),),
        brokers=(broker(refusing_ms=9_000),),
        health={"g1": health(ready=False, reason="the disk is full", **details)},
        now_ms=60_000,
    )
    assert explain(given).causes[0].text.startswith(known)
    older = replace(given, brokers=(broker(),))
    assert explain(older).causes[0].text.startswith(unknown)


def test_child_waits_for_its_parent_since_it_was_opened():
    given = facts(
        partition(1, 0, 1024),
        partition(2, 0, 512, 1),
        partition(3, 512, 1024, 1),
        progress_of=(
            progress(1, state=PartitionState.SEALED),
            progress(2, age_ms=8_000),
            progress(3, age_ms=9_000),
        ),
        now_ms=60_000,
    )
    [waits] = [cause for cause in explain(given).causes if cause.code == "parent_unread"]
    assert waits.text.startswith(
        "partitions 2, 3, opened 9.0 s ago (00:00:51 UTC), wait until partition 1, which c1 has, is "
        "read to its end"
    )


@pytest.mark.parametrize(
    ("left_ms", "code", "when"),
    [
        (90_000, "scheduled", "the first comes in 90 s (at 00:02:30 UTC)"),
        (-10_000, "scheduled", "the first was due 10 s ago (00:00:50 UTC)"),
        (-10_001, "scheduled_late", "the first was due 10 s ago (00:00:49 UTC)"),
    ],
)
def test_scheduled_message_is_late_some_seconds_after_its_time(left_ms: int, code: str, when: str):
    message = ScheduledView(
        scheduled_id="1",
        subject="orders",
        deliver_at_ms=60_000 + left_ms,
        size_bytes=1,
        broker_group="g1",
        due=left_ms <= 0,
    )
    page = ScheduledPage(broker_group="g1", count=1, messages=[message])
    given = facts(WHOLE, progress_of=(read(1),), scheduled=(page,), now_ms=60_000)
    [cause] = [each for each in explain(given).causes if each.code.startswith("scheduled")]
    assert cause.code == code
    assert cause.text.endswith(when)


# ── owners ────────────────────────────────────────────────────────────────────────────────────────
def test_partition_that_has_to_change_hands_is_named_with_both_consumers():
    given = facts(WHOLE, progress_of=(progress(1, hands_over_to="c2", holder="s1"),))
    [first, *_] = explain(given).causes
    assert first.code == "hand_over"
    assert first.text.startswith("consumer c1 has to hand over partition 1 to c2")


def test_owner_that_does_not_show_up_at_the_broker_is_named():
    group = GroupStatus(group="billing", token=1, cursor=0, acked_above=0, lag=10, holder=None)
    given = facts(WHOLE, progress_of=(progress(1),), statuses={1: status(1, groups=(group,))})
    assert codes(given) == ["not_read", "behind"]


@pytest.mark.parametrize(
    ("owner", "session", "holder", "text"),
    [
        ("c2", "s2", "s1", "consumer c2 waits for partition 1: broker group g1 has promised"),
        (None, None, "s1", "nobody is let in to partition 1: broker group g1 has promised"),
        ("c1", "s1", "s1", None),
    ],
)
def test_promise_to_the_owner_before_is_named_while_another_waits(
    owner: str | None, session: str | None, holder: str, text: str | None
):
    waiting = progress(
        1,
        owner=owner,
        session=session,
        holder=holder,
        previous_owner="c1",
        promised_ms=12_000,
    )
    found = explain(facts(WHOLE, progress_of=(waiting,))).causes
    told = [each for each in found if each.code == "promised"]
    assert [each.text.startswith(text) for each in told] == ([True] if text else [])
    if told:
        assert found[0] is told[0]
        assert "the owner before, c1, which cannot reach a metaserver" in told[0].text
        assert "nobody else gets it for 12 s" in told[0].text
        assert "not_read" not in {each.code for each in found}


def test_partition_whose_start_is_not_stored_is_not_blamed_on_an_ended_lease():
    given = facts(WHOLE, progress_of=(progress(1, owner=None, session=None),))
    assert codes(given) == ["no_owner"]
    settings = GroupSettings(subject="orders", group="billing", unstarted=(1,))
    given = replace(given, group=replace(given.group, settings=settings))
    assert codes(given) == ["not_granted"]


def test_partition_without_an_owner_is_told_with_the_consumer_whose_leases_ended_last():
    given = facts(WHOLE, progress_of=(progress(1, owner=None, session=None),))
    ended = EndedMember(client="vm:1", left=False, ended_ms=400, heard_ms=30_400)
    [cause, *_] = explain(replace(given, group=replace(given.group, ended=ended))).causes
    assert cause.code == "no_owner"
    assert cause.text.endswith(
        "; of the consumers whose leases ended, the last one, vm:1, was last heard 30 s ago, and its "
        "leases ended 0.4 s ago"
    )


def test_partition_of_a_silent_broker_is_not_blamed_on_an_ended_lease():
    child = replace(partition(3, 512, 1024, 2), broker_group="g2")
    given = facts(
        partition(1, 0, 512),
        replace(partition(2, 512, 1024), broker_group="g2"),
        child,
        progress_of=(
            progress(1, state=PartitionState.SEALED, holder="s1"),
            progress(2, state=PartitionState.SEALED, broker_group="g2", lag=0),
            progress(3, broker_group="g2", owner=None, lag=None),
        ),
        brokers=(broker(), broker("g2")),
        silent={"g2": "has not answered within 0.6 s"},
    )
    assert codes(given) == ["broker_hangs", "behind"]
    assert codes(replace(given, silent={}, brokers=())) == ["no_owner", "behind"]


def test_cut_off_consumer_is_not_blamed_for_partitions_that_another_has():
    member = GroupMember(
        client="c2", partitions=0, heard_ms=100, expires_in_ms=29_000, unreached=("g1",)
    )
    given = facts(WHOLE, progress_of=(read(1),), brokers=(broker(),))
    given = replace(given, group=replace(given.group, members=(member,)))
    assert codes(given) == ["all_acked"]
    alone = replace(given, group=replace(given.group, partitions=(read(1, owner="c2"),)))
    assert codes(alone) == ["owner_cut_off"]


# ── one key ───────────────────────────────────────────────────────────────────────────────────────
def test_lag_of_other_keys_is_not_the_cause_for_a_key_that_is_acked():
    given = facts(
        WHOLE,
        progress_of=(progress(1, holder="s1"),),
        key=b"a",
        newest={1: newest(7, acked=True)},
        now_ms=1_000_000,
    )
    [cause] = explain(given).causes
    assert cause.code == "all_acked"
    assert cause.text.startswith(
        "group billing has acked the newest message of the key, at offset 7 of partition 1, stored "
        "4.0 s ago (00:16:36 UTC)"
    )


def test_key_that_is_handled_is_said_to_be_before_what_else_stands():
    given = facts(
        WHOLE,
        progress_of=(progress(1, holder="s1", failing=FAILING),),
        key=b"a",
        newest={1: newest(7, acked=True)},
    )
    assert codes(given) == ["all_acked", "handler_fails"]
    assert codes(replace(given, newest={1: newest(7, acked=False)}))[0] == "behind"
    own = replace(FAILING, key_digest=key_digest(b"a"))
    shared = replace(given, group=replace(given.group, partitions=(progress(1, failing=own),)))
    assert codes(shared)[0] == "handler_fails", "a shared group acks newer messages before it"


def test_failing_message_of_another_key_does_not_hide_that_the_key_may_fail():
    """An older consumer tells only the oldest failing message of a partition."""
    given = facts(
        WHOLE,
        progress_of=(progress(1, holder="s1", failing=FAILING),),
        key=b"a",
        newest={1: newest(7, acked=False)},
    )
    cause = explain(given).causes[1]
    assert cause.code == "handler_fails"
    assert cause.text.endswith(
        "; it has another key, for which this key does not wait; not every failing message is "
        "known, so this key may fail as well"
    )
    alone = replace(FAILING, others_count=0)
    known = replace(
        given, group=replace(given.group, partitions=(progress(1, holder="s1", failing=alone),))
    )
    assert explain(known).causes[1].text.endswith("for which this key does not wait")


def other_failing(offset: int, key: bytes, at_ms: int, **changes: object) -> FailingMessage:
    return replace(FAILING, offset=offset, key_digest=key_digest(key), at_ms=at_ms, **changes)


OTHERS = (
    other_failing(9, b"b", 58_000, text="no such town"),
    other_failing(7, b"c", 50_000, running_ms=9_000),
)


@pytest.mark.parametrize(
    ("others", "count", "text"),
    [
        ((), 0, "; later messages of its key wait"),
        (
            OTHERS[:1],
            1,
            (
                "; later messages of its key wait; 1 more message of the partition fails or hangs, "
                f"newest error first: offset 9 of partition 1 ({key_digest(b'b')}), 2.0 s ago "
                "(00:00:58 UTC), ValueError: no such town"
            ),
        ),
        (
            OTHERS,
            40,
            (
                "; later messages of its key wait; 40 more messages of the partition fail or hang, "
                f"newest error first: offset 9 of partition 1 ({key_digest(b'b')}), 2.0 s ago "
                f"(00:00:58 UTC), ValueError: no such town; offset 7 of partition 1 "
                f"({key_digest(b'c')}), 10 s ago (00:00:50 UTC), hangs for 9.0 s"
            ),
        ),
        (OTHERS[:1], FAILING_COUNTED_MAX - 1, f"; at least {FAILING_COUNTED_MAX - 1:,} more"),
    ],
)
def test_messages_that_fail_after_the_oldest_are_counted_with_their_newest_errors(
    others: tuple[FailingMessage, ...], count: int, text: str
):
    failing = replace(FAILING, others=others, others_count=count)
    given = facts(WHOLE, progress_of=(progress(1, holder="s1", failing=failing),), now_ms=60_000)
    told = explain(given).causes[0].text
    assert text in told
    assert count or told.endswith(text)


def test_failing_message_of_the_key_in_question_is_named_before_an_older_one():
    failing = replace(FAILING, others=OTHERS, others_count=2)
    given = facts(
        WHOLE,
        progress_of=(progress(1, holder="s1", failing=failing),),
        now_ms=60_000,
        key=b"b",
        newest={1: newest(9, acked=False)},
    )
    [cause] = explain(given).causes
    assert cause.code == "handler_fails"
    assert "with offset 9 of partition 1 (this key)" in cause.text
    assert (
        "2 more messages of the partition fail or hang, newest error first: offset 7" in cause.text
    )
    assert cause.text.endswith("(key digest ab), 58 s ago (00:00:02 UTC), ValueError")


def test_key_is_not_said_to_be_handled_while_its_youngest_partition_is_not_known():
    child = replace(partition(2, 0, 1024, 1), broker_group="g2")
    given = facts(
        replace(WHOLE, state=PartitionState.SEALED),
        child,
        progress_of=(
            read(1, state=PartitionState.SEALED),
            progress(2, lag=None, broker_group="g2"),
        ),
        key=b"a",
        newest={1: newest(7, acked=True)},
        silent={"g2": "has not answered within 0.6 s"},
    )
    assert codes(given) == ["broker_hangs"]
    empty = replace(newest(None), partition_id=2)
    assert codes(replace(given, newest={1: newest(7, acked=True), 2: empty}))[0] == "all_acked"


def test_producer_that_waits_comes_before_a_key_that_is_handled_as_far_as_it_is_stored():
    waits = WaitingProducer(
        client="vm:1", broker_group="g1", messages=1, waiting_ms=9_000, reason="no answer"
    )
    given = facts(
        WHOLE,
        progress_of=(read(1),),
        key=b"a",
        newest={1: newest(7, acked=True)},
        brokers=(broker(),),
    )
    given = replace(given, group=replace(given.group, waiting_producers=(waits,)))
    assert codes(given) == ["producer_waits", "all_acked"]


@pytest.mark.parametrize(
    ("policy", "step"),
    [
        (None, "or set the key aside: keylane group set orders billing --on-failure park"),
        (FailurePolicy.BLOCK, "keylane group set orders billing --on-failure park"),
        (FailurePolicy.PARK, "the policy park of the group applies after its last try"),
    ],
)
def test_step_for_a_failing_handler_does_not_advise_the_policy_that_is_set(
    policy: FailurePolicy | None, step: str
):
    settings = GroupSettings(
        subject="orders", group="billing", policy=GroupPolicy(on_failure=policy)
    )
    given = facts(WHOLE, progress_of=(progress(1, failing=FAILING),))
    given = replace(given, group=replace(given.group, settings=settings))
    assert explain(given).causes[0].step.endswith(step)


def test_search_that_did_not_reach_the_cursor_leaves_the_lag_as_a_cause():
    given = facts(
        WHOLE,
        progress_of=(progress(1, offset=2, lag=8, holder="s1"),),
        key=b"a",
        newest={1: newest(None, searched_from=5)},
    )
    assert codes(given) == ["behind", "key_not_stored"]
    assert "among the newest 5 messages" in explain(given).causes[1].text
    complete = replace(given, newest={1: newest(None, searched_from=2)})
    assert codes(complete) == ["key_not_stored"]


def test_parked_keys_are_all_counted_and_told_with_the_newest_error():
    two = parked_key(b"a", 9_000, "newest"), parked_key(b"b", 2_000, "older")
    given = facts(WHOLE, progress_of=(read(1),), parked=two, now_ms=541_000)
    text = explain(given).causes[0].text
    assert text.startswith(
        "2 keys have been parked for 9 min (since 00:00:01 UTC), with 4 messages;"
    )
    assert text.endswith("ValueError: newest")
    failure = Failure("KeyError", "of key 7,000", "c1", 9_500, 1)
    totals = ParkedTotals(keys=10_000, messages=30_000, since_ms=500, failure=failure)
    text = explain(replace(given, parked_totals={1: totals})).causes[0].text
    assert text.startswith("10000 keys have been parked for 9 min (since 00:00:00 UTC)")
    assert "with 30000 messages" in text
    assert text.endswith("KeyError: of key 7,000")
    assert explain(given).unknown == ()


def test_parked_keys_that_a_broker_does_not_count_are_at_least_so_many():
    given = facts(WHOLE, progress_of=(read(1),), parked=(parked_key(b"a", 1, "no"),))
    text = explain(replace(given, is_parked_partial=True)).causes[0].text
    assert text.startswith("at least 1 key has been parked since")
    assert "with at least 2 messages" in text


def test_redriven_key_is_not_said_to_be_parked():
    again = replace(parked_key(b"a", 9_000, "no"), state=ParkState.REDRIVING)
    given = facts(
        WHOLE,
        progress_of=(read(1),),
        key=b"a",
        newest={1: newest(7, acked=True)},
        parked=(again,),
        now_ms=900_000,
    )
    [cause] = explain(given).causes
    assert cause.code == "redriven"
    assert cause.text == (
        "2 messages of the key are being handled again after a redrive; the last error, after 5 "
        "tries, was ValueError: no"
    )
    assert cause.step == "wait; if they fail again, look at the handler's log"
    other = parked_key(b"b", 9_000, "no")
    both = replace(given, key=None, newest={}, parked=(again, other))
    parked, redriven = explain(both).causes
    assert parked.text.startswith("1 key has been parked for 14 min")
    assert redriven.text.startswith("2 messages of 1 key are being handled again")


def test_dead_letters_that_are_redriven_do_not_wait_for_a_retry():
    again = replace(parked_key(b"", 9_000, "no"), key=None, state=ParkState.REDRIVING, tries=0)
    given = facts(WHOLE, progress_of=(read(1),), parked=(again,))
    assert codes(given) == ["redriven"]


def test_dead_letters_of_any_key_are_told_after_the_rest_when_a_key_is_asked_for():
    dead = ParkedKeyView(
        partition_id=1,
        key=None,
        state=ParkState.DEAD,
        messages=3,
        since_ms=1_000,
        failure=Failure("ValueError", "no such customer", "c1", 1_000, 5),
        first_source=1,
        first_offset=2,
    )
    given = facts(
        WHOLE, progress_of=(read(1),), key=b"a b", newest={1: newest(7, acked=True)}, parked=(dead,)
    )
    assert codes(given) == ["dead_letters", "all_acked"]
    [cause, _] = explain(given).causes
    assert cause.step.endswith(": keylane dead retry orders billing --key-hex 612062")
    anyone = replace(given, key=None, now_ms=541_000)
    [cause] = explain(anyone).causes
    assert cause.code == "parked"
    assert cause.text.startswith("3 messages were given up, the first 9 min ago (00:00:01 UTC);")
    assert cause.step == "repair the handler, then: keylane dead retry orders billing"
    both = explain(replace(anyone, parked=(dead, parked_key(b"a", 1, "no")))).causes[0]
    assert both.text.startswith("5 messages were set aside, the first 9 min ago")


@pytest.mark.parametrize(
    ("text", "tags", "is_certain"),
    [
        ("tags eu, uk", (), True),
        ("tags eu, uk", ("us",), True),
        ("tags eu, uk; region = 'x'", ("us",), True),
        ("tags eu, uk", ("uk", "us"), False),
        ("region = 'x'", ("us",), False),
        ("tags eu, … (ab)", ("us",), False),
    ],
)
def test_filter_is_said_to_leave_a_message_out_only_when_that_is_certain(
    text: str, tags: tuple[str, ...], *, is_certain: bool
):
    member = GroupMember(client="c1", partitions=1, heard_ms=100, expires_in_ms=29_000, filter=text)
    given = facts(
        WHOLE, progress_of=(read(1),), key=b"a", newest={1: newest(7, acked=True, tags=tags)}
    )
    given = replace(given, group=replace(given.group, members=(member,)))
    [cause] = explain(given).causes
    assert cause.code == "filtered_out"
    assert ("leaves it out" in cause.text) is is_certain


# ── lag ───────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("acked", "stored", "text"),
    [
        (50, 25, "100 a second are acked: at this rate it has caught up in 20 s"),
        (50, 60, "100 a second are acked, 120 a second arrive: it stays behind"),
        (0, 60, "c1 has acked none within 0.5 s; the oldest has waited for at least 10 s:"),
    ],
)
def test_lag_is_told_with_the_rate(acked: int, stored: int, text: str):
    given = facts(
        WHOLE,
        progress_of=(progress(1, lag=1_000, holder="s1"),),
        paces={1: LagPace(over_ms=500, stored=stored, acked=acked)},
    )
    [cause] = explain(given).causes
    assert text in cause.text


@pytest.mark.parametrize(
    ("acked", "stored", "oldest_ms", "step"),
    [
        (50, 0, STUCK_MS, "wait, nothing holds it up"),
        (50, 60, STUCK_MS, "it needs more consumers, more partitions, or a faster handler"),
        (0, 0, 0, "look at the log and the process of c1"),
        (0, 0, STUCK_MS, "look at the log and the process of c1"),
    ],
)
def test_step_for_a_lag_says_to_wait_only_where_an_ack_was_seen(
    acked: int, stored: int, oldest_ms: int, step: str
):
    pace = LagPace(over_ms=500, stored=stored, acked=acked, oldest_ms=oldest_ms)
    given = facts(WHOLE, progress_of=(progress(1, lag=1_000, holder="s1"),), paces={1: pace})
    [cause] = explain(given).causes
    assert cause.code == "behind"
    assert cause.step.startswith(step)
    assert ("wait, nothing" in cause.step) is (acked > stored)


def test_consumer_that_may_be_dead_is_told_with_the_end_of_its_lease_and_what_arrives():
    member = GroupMember(client="c1", partitions=1, heard_ms=6_000, expires_in_ms=24_000)
    given = facts(
        WHOLE,
        progress_of=(progress(1, lag=1_000, holder="s1"),),
        paces={1: LagPace(over_ms=500, stored=0, acked=0, oldest_ms=0)},
        statuses={1: status(1, messages_per_s=3.3)},
    )
    [cause] = explain(replace(given, group=replace(given.group, members=(member,)))).causes
    assert "c1, last heard 6.0 s ago, has acked none within 0.5 s; 3.3 a second" in cause.text
    assert "if it is dead, its lease ends in 24 s; a slow handler needs more time" in cause.step


def test_removed_messages_are_named_with_their_partition():
    given = facts(WHOLE, progress_of=(read(1, removed_unread=12),))
    [cause] = explain(given).causes
    assert cause.text == (
        "retention has removed 12 messages of partition 1 before billing had read them"
    )


@hypothesis.given(
    texts=strategies.lists(strategies.text(max_size=30), min_size=4, max_size=4),
    key=strategies.binary(max_size=20),
)
def test_no_text_of_users_puts_control_characters_into_an_answer(texts: list[str], key: bytes):
    client, error, address, filter_text = texts
    failing = FailingMessage(
        offset=3,
        key_digest=error,
        since_ms=1_000,
        attempts=2,
        kind=error,
        text=error,
        client=client,
        at_ms=2_000,
    )
    member = GroupMember(
        client=client,
        partitions=1,
        heard_ms=20_000,
        expires_in_ms=10_000,
        filter=filter_text,
        unreached=("g1",),
    )
    asked = facts(
        WHOLE,
        progress_of=(progress(1, owner=client, failing=failing, removed_unread=1),),
        key=key,
        newest={1: newest(7, acked=True, tags=(error,))},
        brokers=(broker(available=False, address=address),),
        silent={"g1": error},
        unknown=(error,),
    )
    asked = replace(asked, group=replace(asked.group, members=(member,)))
    answer = explain(asked)
    for text in (*answer.unknown, *(t for each in answer.causes for t in (each.text, each.step))):
        assert text == printable(text)
