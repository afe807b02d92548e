"""The copies of a broker group that acks wait for, in the database."""

from __future__ import annotations

import pytest

from keylane.metaserver.backup.rows import store_rows
from keylane.metaserver.cluster.brokers import broker_views, forget_copies, store_report
from keylane.metaserver.cluster.copy_sets import (
    change_copy_set,
    check_no_operation,
    forget_copy,
    offer_place,
    promote_copy,
    read_copy_set,
    set_copies,
)
from keylane.metaserver.cluster.subjects import plan_subject
from keylane.protocol.control import BrokerHeartbeat, CreateSubject
from keylane.protocol.copies import (
    HAND_OVER_MS,
    ChangeCopySet,
    CopySet,
    ForgetCopy,
    OfferPlace,
    PromoteCopy,
    SetCopies,
)
from keylane.protocol.errors import (
    FolderRefusedError,
    InvalidRequestError,
    NotFoundError,
    Reason,
)
from keylane.protocol.operations import OperationKind, Reshape
from support.raising import raises
from support.sql.rows import Rows

TTL_MS = 10_000


@pytest.fixture
def rows() -> Rows:
    rows = Rows()
    report(rows, "o1")
    return rows


def report(rows: Rows, opening: str, *after: str, ttl_ms: int = TTL_MS, log_end: int = 500) -> None:
    heartbeat = BrokerHeartbeat(
        broker_group="g1",
        broker_id="folder",
        address="g1:1",
        opening=opening,
        opened_after=after,
        log_end=log_end,
    )
    rows.run(store_report, heartbeat, ttl_ms=ttl_ms)


def change(
    rows: Rows,
    *members: str,
    opening: str = "o1",
    term: int = 0,
    version: int,
    durable_end: int = 0,
) -> CopySet:
    request = ChangeCopySet(
        broker_id="folder",
        opening=opening,
        term=term,
        version=version,
        members=members,
        durable_end=durable_end,
    )
    return rows.run(change_copy_set, "g1", request)


def promote(
    rows: Rows,
    copy_id: str,
    *,
    log_end: int = 500,
    lose: bool = False,
    gone_from: str = "",
    start_ms: int = 0,
) -> CopySet:
    request = PromoteCopy(copy_id=copy_id, broker_id="folder", log_end=log_end, lose=lose)
    return rows.run(promote_copy, "g1", request, gone_from=gone_from, start_ms=start_ms)


def test_group_has_one_folder_until_more_are_wanted(rows: Rows) -> None:
    assert rows.run(read_copy_set, "g1") == CopySet()
    stored = rows.run(set_copies, "g1", SetCopies(wanted=2))
    assert stored == CopySet(wanted=2, version=1) == rows.run(read_copy_set, "g1")
    assert rows.run(set_copies, "g1", SetCopies(wanted=2)) == stored
    with pytest.raises(NotFoundError):
        rows.run(read_copy_set, "g2")


@pytest.mark.parametrize(
    ("wanted", "least", "stored"), [(1, None, 1), (2, None, 1), (3, None, 2), (5, 1, 1), (2, 2, 2)]
)
def test_acks_need_two_folders_of_three_unless_another_number_is_given(
    rows: Rows, wanted: int, least: int | None, stored: int
) -> None:
    assert rows.run(set_copies, "g1", SetCopies(wanted=wanted, least=least)).least == stored
    assert rows.run(read_copy_set, "g1").least == stored


def test_more_folders_than_wanted_cannot_be_needed(rows: Rows) -> None:
    before = rows.run(set_copies, "g1", SetCopies(wanted=3))
    with pytest.raises(
        InvalidRequestError, match="3 data folders cannot have each message where 2"
    ):
        rows.run(set_copies, "g1", SetCopies(wanted=2, least=3))
    assert rows.run(read_copy_set, "g1") == before


def test_copies_on_one_machine_may_count_only_if_an_operator_says_so(rows: Rows) -> None:
    """It is kept when only the number is changed."""
    assert not rows.run(set_copies, "g1", SetCopies(wanted=2)).may_share_machine
    allowed = rows.run(set_copies, "g1", SetCopies(wanted=2, may_share_machine=True))
    assert allowed == CopySet(wanted=2, version=2, may_share_machine=True)
    assert rows.run(read_copy_set, "g1") == allowed
    assert rows.run(set_copies, "g1", SetCopies(wanted=3)).may_share_machine
    refused = rows.run(set_copies, "g1", SetCopies(wanted=3, may_share_machine=False))
    assert not refused.may_share_machine


def test_set_is_changed_only_from_the_version_that_its_broker_knows(rows: Rows) -> None:
    """A late repeat of a proposal changes nothing."""
    assert change(rows, "a", version=0).members == ("a",)
    assert change(rows, "a", version=0) == CopySet(members=("a",), version=1)
    assert change(rows, "b", version=0) == CopySet(members=("a",), version=1)
    assert change(rows, "a", "b", version=1).members == ("a", "b")


def test_set_is_not_changed_by_an_earlier_opening_of_the_folder(rows: Rows) -> None:
    report(rows, "o2", "o1")
    with raises(Reason.COPY_SET_TAKEN):
        change(rows, "a", version=0)
    assert change(rows, "a", version=0, opening="o2").members == ("a",)


def test_copy_is_promoted_when_acks_have_waited_for_it(rows: Rows) -> None:
    """Its broker is then taken although it does not know the last opening, nor what the one before
    had not made durable; that one is refused, also before that, and cannot change the set that it knows.
    """
    change(rows, "a", version=0)
    report(rows, "o2", "o1")
    with raises(Reason.BROKER_SERVES):
        promote(rows, "a")
    report(rows, "o2", ttl_ms=0)
    promoted = promote(rows, "a", log_end=480)
    assert promoted == CopySet(term=1, version=2, promoted="a", durable_end=480)
    assert promote(rows, "a") == promoted, "a repeat changes nothing"
    with pytest.raises(FolderRefusedError):
        report(rows, "o3", "o2", "o1")
    report(rows, "copy", "o1", "a", log_end=480)
    with pytest.raises(FolderRefusedError):
        report(rows, "o3", "o2", "o1")
    with raises(Reason.COPY_SET_TAKEN):
        change(rows, opening="o2", version=1)
    assert change(rows, "b", opening="copy", version=1, term=0).members == ()
    assert change(rows, "b", opening="copy", version=2, term=1).members == ("b",)


def test_others_of_the_set_stay_when_a_copy_is_promoted(rows: Rows) -> None:
    """They have what was acked as well."""
    change(rows, "a", "b", "c", version=0)
    report(rows, "o1", ttl_ms=0)
    assert promote(rows, "b").members == ("a", "c")


def test_copy_takes_the_place_of_a_broker_that_is_gone_within_its_ttl(rows: Rows) -> None:
    """Another copy has to wait until the first one could have started."""
    change(rows, "a", "b", version=0)
    with raises(Reason.BROKER_SERVES):
        promote(rows, "a", gone_from="127.0.0.1:1")
    taken = promote(rows, "a", gone_from="g1:1", start_ms=60_000)
    assert (taken.promoted, taken.members) == ("a", ("b",))
    assert promote(rows, "a", gone_from="g1:1", start_ms=60_000) == taken, "a repeat"
    with raises(Reason.BROKER_SERVES, match="was given to copy a"):
        promote(rows, "b", gone_from="g1:1", start_ms=60_000)
    report(rows, "o2", "o1", "a", ttl_ms=0)
    assert change(rows, "b", opening="o2", term=-1, version=0).promoted == ""
    assert promote(rows, "b", start_ms=60_000).term == 2


def test_promotion_is_over_when_a_broker_serves_again(rows: Rows) -> None:
    """It takes messages that a copy lacks which was promoted before, and was not used."""
    change(rows, "a", version=0)
    report(rows, "o1", ttl_ms=0)
    assert promote(rows, "a").promoted == "a"
    report(rows, "o2", "o1", "a")
    assert change(rows, opening="o2", term=0, version=1).promoted == "a"
    assert change(rows, opening="o2", term=-1, version=0).promoted == ""
    report(rows, "o2", ttl_ms=0)
    with raises(Reason.COPY_LACKS_ACKED):
        promote(rows, "a")


def test_copy_is_promoted_with_a_loss_only_if_that_is_said(rows: Rows) -> None:
    change(rows, "a", version=0)
    change(rows, "a", version=1, durable_end=500)
    report(rows, "o1", ttl_ms=0)
    with raises(Reason.COPY_LACKS_ACKED):
        promote(rows, "spare")
    with raises(Reason.COPY_LACKS_ACKED):
        promote(rows, "a", log_end=499)
    assert promote(rows, "spare", lose=True).promoted == "spare"


def test_copy_of_another_folder_is_not_promoted_whatever_is_given_up(rows: Rows) -> None:
    """As in another cluster that has a group of the same name."""
    change(rows, "a", version=0)
    report(rows, "o1", ttl_ms=0)
    request = PromoteCopy(copy_id="a", broker_id="another", log_end=500, lose=True)
    with raises(Reason.COPY_OF_OTHER_FOLDER):
        rows.run(promote_copy, "g1", request)
    assert rows.run(read_copy_set, "g1") == CopySet(members=("a",), version=1)


def test_proposal_of_an_earlier_process_is_void_when_a_broker_has_started(rows: Rows) -> None:
    """Also if its folder could not be given a new opening, because the disk was full."""
    rows.run(set_copies, "g1", SetCopies(wanted=2))
    begun = rows.run(change_copy_set, "g1", ChangeCopySet(broker_id="folder", opening="o1"))
    assert begun == CopySet(wanted=2, version=2)
    assert change(rows, "a", version=1).members == ()


def test_repeated_promotion_is_refused_when_the_copy_has_less_by_then(rows: Rows) -> None:
    change(rows, "a", version=0)
    report(rows, "o1", ttl_ms=0)
    promote(rows, "a")
    with raises(Reason.COPY_LACKS_ACKED):
        promote(rows, "a", log_end=499)


def test_set_is_emptied_when_another_folder_is_the_groups(rows: Rows) -> None:
    change(rows, "a", version=0, durable_end=500)
    rows.run(forget_copies, "g1")
    assert rows.run(read_copy_set, "g1") == CopySet(version=2)


def test_list_of_brokers_says_how_many_folders_each_has_and_is_to_have(rows: Rows) -> None:
    def text() -> str:
        [view] = rows.run(broker_views)
        return view.folders_text

    assert text() == "1"
    rows.run(set_copies, "g1", SetCopies(wanted=2))
    assert text() == "1 of 2: too few"
    change(rows, "a", version=1)
    assert text() == "2 of 2"
    rows.run(set_copies, "g1", SetCopies(wanted=1))
    assert text() == "2 of 1"


def test_empty_folder_is_told_to_promote_a_copy_when_the_group_has_one(rows: Rows) -> None:
    """An evacuation would give it up."""
    rows.run(plan_subject, CreateSubject(subject="s", partitions=1), subjects_max=10)
    change(rows, "a", version=0)
    report(rows, "o1", ttl_ms=0)
    empty = BrokerHeartbeat(broker_group="g1", broker_id="another", address="g1:2")
    with raises(Reason.FOLDER_HAS_COPIES, match="1 copy of it may take its place"):
        rows.run(store_report, empty, ttl_ms=TTL_MS)


def test_copies_are_in_quarantine_in_a_restored_database() -> None:
    """Acks may have gone on without the copies that the backup names."""
    stored = {
        "broker_group": "g1",
        "wanted": 3,
        "least": 2,
        "members": '["a"]',
        "term": 2,
        "version": 5,
        "promoted": "b",
        "durable_end": 500,
    }
    rows = Rows()
    rows.run(store_rows, [("copy_sets", stored)], route_version=1, broker_ttl_ms=TTL_MS)
    report(rows, "o1")
    restored = rows.run(read_copy_set, "g1")
    assert (restored.wanted, restored.least) == (3, 2)
    assert (restored.members, restored.term, restored.promoted) == (("a",), 2, "")
    assert restored.version > 1_000, "a proposal that is under way comes too late"
    assert restored.quarantine == "the database was restored from a backup"


# ── forgetting ────────────────────────────────────────────────────────────────────────────────────
def forget(rows: Rows, copy_id: str) -> CopySet:
    stored: CopySet = rows.run(forget_copy, "g1", ForgetCopy(copy_id=copy_id))
    return stored


def test_copy_that_is_forgotten_is_promoted_without_a_question_no_more(pair: Rows) -> None:
    before = pair.run(read_copy_set, "g1")
    stored = forget(pair, "a")
    assert stored.members == ("b",)
    assert stored.version == before.version + 1, "a proposal that is on its way is void"
    assert pair.run(read_copy_set, "g1") == stored
    pair.clock.advance(TTL_MS + 1)
    with raises(Reason.COPY_LACKS_ACKED):
        promote(pair, "a")


def test_last_copy_of_the_set_is_not_forgotten(pair: Rows) -> None:
    stored = forget(pair, "a")
    with raises(Reason.COPY_NEEDED, match="the only one"):
        forget(pair, "b")
    with raises(Reason.COPY_UNKNOWN, match="wait for no copy a"):
        forget(pair, "a")
    assert pair.run(read_copy_set, "g1") == stored


def test_copy_is_not_forgotten_when_nothing_would_be_acked_without_it(pair: Rows) -> None:
    stored = pair.run(set_copies, "g1", SetCopies(wanted=3, least=3))
    with raises(Reason.COPY_NEEDED, match="an ack needs 3 data folders"):
        forget(pair, "a")
    assert pair.run(read_copy_set, "g1") == stored


# ── hand-over ─────────────────────────────────────────────────────────────────────────────────────
def offer(rows: Rows, copy_id: str, *, opening: str = "o1", term: int = 0) -> CopySet:
    request = OfferPlace(broker_id="folder", opening=opening, term=term, copy_id=copy_id)
    return rows.run(offer_place, "g1", request)


@pytest.fixture
def pair(rows: Rows) -> Rows:
    """A broker that lives, with the copies a and b."""
    rows.run(set_copies, "g1", SetCopies(wanted=3))
    change(rows, "a", "b", version=1, durable_end=500)
    return rows


def test_place_of_a_broker_that_lives_goes_to_the_copy_that_it_is_offered_to(pair: Rows) -> None:
    assert offer(pair, "a").handing_to == "a" == pair.run(read_copy_set, "g1").handing_to
    with raises(Reason.BROKER_SERVES):
        promote(pair, "b")
    taken = promote(pair, "a", start_ms=5_000)
    assert (taken.term, taken.promoted, taken.members) == (1, "a", ("b",))
    assert taken.handing_to == "" == pair.run(read_copy_set, "g1").handing_to
    with raises(Reason.COPY_SET_TAKEN):
        offer(pair, "b")
    with raises(Reason.BROKER_SERVES):
        promote(pair, "b")


def test_offer_survives_the_broker_s_other_changes_of_the_set(pair: Rows) -> None:
    offer(pair, "a")
    change(pair, "a", "b", version=2, durable_end=600)
    assert pair.run(read_copy_set, "g1").handing_to == "a"


def test_offer_ends_when_it_is_withdrawn_or_its_time_is_over(pair: Rows) -> None:
    offer(pair, "a")
    assert offer(pair, "").handing_to == ""
    with raises(Reason.BROKER_SERVES):
        promote(pair, "a")
    offer(pair, "a")
    pair.clock.advance(HAND_OVER_MS + 1)
    assert pair.run(read_copy_set, "g1").handing_to == ""
    with raises(Reason.BROKER_SERVES):
        promote(pair, "a")


def test_copy_that_lacks_something_gets_no_place_that_it_is_offered(pair: Rows) -> None:
    offer(pair, "a")
    with raises(Reason.COPY_LACKS_ACKED):
        promote(pair, "a", log_end=499)
    assert pair.run(read_copy_set, "g1").term == 0


def test_place_is_offered_to_one_copy_of_the_set_by_the_newest_opening(pair: Rows) -> None:
    with raises(Reason.COPY_NOT_READY):
        offer(pair, "c")
    with raises(Reason.COPY_NOT_READY):
        offer(pair, "a", term=3)
    with raises(Reason.COPY_SET_TAKEN):
        offer(pair, "a", opening="o0")
    assert pair.run(read_copy_set, "g1").handing_to == ""
    offer(pair, "a")
    with raises(Reason.HAND_OVER_RUNNING):
        offer(pair, "b")
    assert offer(pair, "a").handing_to == "a"


def test_hand_over_waits_for_an_operation_on_the_group_s_partitions(pair: Rows) -> None:
    pair.run(check_no_operation, "g1")
    pair.create("orders", 2)
    pair.run(check_no_operation, "g1")
    pair.begin(Reshape(kind=OperationKind.RESIZE, subject="orders", partitions=3))
    with raises(Reason.OPERATION_RUNNING):
        pair.run(check_no_operation, "g1")
    pair.run(check_no_operation, "g2")
