"""Causes from facts: which partitions concern a key, and texts with anything in them."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies
from msgspec.structs import replace

from keylane.admin import GroupDescription, ParkedKeyView, PartitionProgress
from keylane.admin.why.causes import explain
from keylane.admin.why.facts import Facts, LagPace, partitions_of_key
from keylane.protocol.control import (
    BrokerView,
    EndedMember,
    GroupMember,
    GroupStatus,
    Health,
    PartitionStatus,
)
from keylane.protocol.groups import GroupSettings
from keylane.protocol.parked import FailingMessage, Failure, ParkState
from keylane.protocol.reading.newest import NewestMessage
from keylane.protocol.routing import (
    LOGICAL_PARTITIONS,
    ConsumeStrategy,
    Partition,
    PartitionState,
    logical_partition,
)
from keylane.protocol.text import printable


def partition(number: int, start: int, end: int, *parents: int) -> Partition:
    return Partition(
        partition_id=number,
        name=f"p{number}",
        queue=0,
        range_start=start,
        range_end=end,
        broker_group="g1",
        state=PartitionState.OPEN if not start or parents else PartitionState.SEALED,
        parents=parents,
        address="h:1",
    )


def progress(number: int, **changes: object) -> PartitionProgress:
    return replace(
        PartitionProgress(
            partition_id=number,
            name=f"p{number}",
            state=PartitionState.OPEN,
            broker_group="g1",
            owner="c1",
            session="s1",
            token=1,
            expires_in_ms=20_000,
            offset=0,
            acked_above=0,
            next_offset=10,
            lag=10,
        ),
        **changes,
    )


def facts(*partitions: Partition, progress_of: tuple[PartitionProgress, ...], **changes) -> Facts:
    group = GroupDescription(
        subject="orders",
        group="billing",
        strategy=ConsumeStrategy.EXCLUSIVE,
        sessions=1,
        lag=10,
        partitions=progress_of,
    )
    return Facts(group=group, partitions=partitions, **changes)


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
def broker(name: str = "g1", **changes: object) -> BrokerView:
    return replace(
        BrokerView(broker_group=name, address="h:1", available=True, silent_ms=200), **changes
    )


def health(*, ready: bool = True, reason: str = "", **details: object) -> Health:
    return Health(program="broker", ready=ready, reason=reason, details=details)


def status(number: int, **changes: object) -> PartitionStatus:
    known = PartitionStatus(
        partition_id=number,
        subject="orders",
        name=f"p{number}",
        state=PartitionState.OPEN,
        first_offset=0,
        next_offset=10,
    )
    return replace(known, **changes)


def read(number: int, **changes: object) -> PartitionProgress:
    return progress(number, lag=0, offset=10, holder="s1", **changes)


WHOLE = partition(1, 0, 1024)


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
        statuses={1: status(1, limited_by="bytes of principal 'shop'", limited_ms=1_200)},
    )
    [cause] = explain(given).causes
    assert cause.code == "over_quota"
    assert cause.text == (
        "calls about orders wait for a quota, the limit of bytes of principal 'shop': 1.2 s now"
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


def test_partition_whose_start_is_not_stored_is_not_blamed_on_an_ended_lease():
    given = facts(WHOLE, progress_of=(progress(1, owner=None, session=None),))
    assert codes(given) == ["no_owner"]
    settings = GroupSettings(subject="orders", group="billing", unstarted=(1,))
    given = replace(given, group=replace(given.group, settings=settings))
    assert codes(given) == ["not_granted"]


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
def newest(offset: int | None, *, searched_from: int = 0, **changes: object) -> NewestMessage:
    found = NewestMessage(
        partition_id=1,
        searched_from=searched_from,
        first_offset=0,
        next_offset=10,
        offset=offset,
        age_ms=4_000,
    )
    return replace(found, **changes)


def test_lag_of_other_keys_is_not_the_cause_for_a_key_that_is_acked():
    given = facts(
        WHOLE,
        progress_of=(progress(1, holder="s1"),),
        key=b"a",
        newest={1: newest(7, acked=True)},
    )
    [cause] = explain(given).causes
    assert cause.code == "all_acked"
    assert cause.text.startswith(
        "group billing has acked the newest message of the key, at offset 7 of partition 1, stored 4.0 s "
        "ago"
    )


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
    assert cause.step == "keylane parked list orders billing --dead --key-hex 612062"
    assert codes(replace(given, key=None)) == ["parked"]


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
        (0, 60, "c1 has acked none of them within 0.5 s"),
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
