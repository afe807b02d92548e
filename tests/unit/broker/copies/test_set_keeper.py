"""Which copies acks wait for: as they come and go, as metaservers answer, after a promotion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from keylane.broker.copies import set_keeper
from keylane.broker.copies.placement import Site
from keylane.broker.copies.set_keeper import (
    AWAY_MS,
    AWAY_MS_MAX,
    IDLE_POLL_MS,
    POLL_MS,
    QUARANTINE_POLL_MS,
    REMEMBERED_MAX,
    SILENT_MS,
    Away,
)
from keylane.broker.storage.data_folder import has_copies
from keylane.protocol.copies import CopySet
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    FlushFailedError,
    InvalidRequestError,
    NotSentError,
    StorageError,
)
from sim.machines.store import batch
from support.brokers.kept_set import COPY_ID, KeptSet
from support.cluster import eventually

OTHER_ID = "d" * 32


@pytest.fixture
async def kept() -> AsyncIterator[KeptSet]:
    """A broker with a copy that acks wait for."""
    kept = KeptSet()
    await kept.desk.host()
    kept.start()
    kept.report()
    await eventually(lambda: kept.stored.members == (COPY_ID,))
    await eventually(lambda: kept.keeper.changes == 1)
    yield kept
    await kept.stop()


def begin_append(kept: KeptSet, sequence: int = 0) -> asyncio.Task[object]:
    return asyncio.ensure_future(kept.desk.append(batch(sequence=sequence)))


async def test_ack_waits_for_a_copy_of_the_set(kept: KeptSet):
    """The folder says so too, for the next start."""
    assert has_copies(kept.disk)
    appending = begin_append(kept)
    await asyncio.sleep(0.05)
    assert not appending.done()
    kept.report()
    await appending


async def test_ack_goes_on_without_a_copy_that_an_operator_has_forgotten(kept: KeptSet):
    appending = begin_append(kept)
    await asyncio.sleep(0.01)
    kept.stored = replace(kept.stored, members=(), version=kept.stored.version + 1)
    asked = len(kept.asked)
    kept.clock.advance(POLL_MS)
    await appending
    assert [each.members for each in kept.asked[asked:]] == [None]


async def test_ack_goes_on_without_a_copy_that_is_late(kept: KeptSet):
    """It joins again when it was away for some time, and has everything."""
    appending = begin_append(kept)
    await asyncio.sleep(0.01)
    kept.clock.advance(2_000)
    await appending
    assert kept.stored.members == ()
    kept.report()
    await asyncio.sleep(0.3)
    assert kept.stored.members == ()
    kept.clock.advance(AWAY_MS)
    kept.report()
    await eventually(lambda: kept.stored.members == (COPY_ID,))


def test_copy_stays_away_for_longer_when_it_is_late_again_and_again():
    """A restarted copy is back in a second, and one whose disk is too slow does not stop all acks
    once a second.
    """
    away, now_ms, lengths = Away(), 0, []
    for _ in range(7):
        away = away.next(now_ms)
        lengths.append(away.until_ms - now_ms)
        now_ms = away.until_ms + 500
    assert lengths == [1_000, 2_000, 4_000, 8_000, 16_000, 20_000, 20_000]
    assert away.next(away.until_ms + AWAY_MS_MAX).length_ms == AWAY_MS


async def test_ack_stands_still_when_no_metaserver_leaves_the_late_copy_out(kept: KeptSet):
    kept.error = NotSentError("no metaserver answers")
    appending = begin_append(kept)
    await asyncio.sleep(0.01)
    kept.clock.advance(1_000)
    assert kept.keeper.problem == ""
    kept.clock.advance(60_000)
    await asyncio.sleep(0.3)
    assert not appending.done()
    assert f"wait for copies ({COPY_ID})" in kept.keeper.problem
    kept.error = None
    await appending
    assert kept.keeper.problem == ""


async def test_copy_counts_while_it_is_not_known_whether_it_was_left_out(kept: KeptSet):
    """The metaserver has stored that it is out, and its answer is lost."""
    kept.error, kept.loses_answers = NotSentError("the answer is lost"), True
    appending = begin_append(kept)
    await asyncio.sleep(0.01)
    kept.clock.advance(2_000)
    await eventually(lambda: kept.stored.members == ())
    await asyncio.sleep(0.1)
    assert not appending.done()
    kept.error = None
    await appending


async def test_copy_counts_while_it_is_not_known_whether_it_has_joined():
    """The metaserver has stored that it is in the set, and its answers are lost."""
    kept = KeptSet()
    await kept.desk.host()
    kept.start()
    await eventually(lambda: kept.keeper.stored is not None)
    kept.error, kept.loses_answers = NotSentError("the answer is lost"), True
    kept.report()
    await eventually(lambda: kept.stored.members == (COPY_ID,))
    appending = begin_append(kept)
    await asyncio.sleep(0.1)
    assert not appending.done()
    kept.report()
    await appending
    await kept.stop()


async def test_proposed_copy_counts_when_a_hand_over_asks_meanwhile():
    """It may be stored yet: a commit without it could be lost."""
    kept = KeptSet()
    await kept.desk.host()
    kept.start()
    await eventually(lambda: kept.keeper.stored is not None)
    kept.error = NotSentError("no metaserver answers")
    kept.report()
    await eventually(lambda: kept.keeper.commitment.proposed == {COPY_ID})
    kept.error = None
    assert not await kept.keeper.was_replaced()
    assert kept.keeper.commitment.counted == {COPY_ID}
    await kept.stop()


async def test_copy_counts_when_a_hand_over_hears_of_an_older_set(kept: KeptSet):
    """The answer was on its way for longer than the one that says that the copy has joined."""
    newer, kept.stored = kept.stored, CopySet(wanted=2)
    assert not await kept.keeper.was_replaced()
    kept.stored = newer
    assert kept.keeper.commitment.members == {COPY_ID}


async def test_commit_that_waits_fails_when_a_copy_was_promoted(kept: KeptSet):
    """And nothing is stored any more."""
    appending = begin_append(kept)
    await asyncio.sleep(0.01)
    kept.stored = CopySet(wanted=2, term=1, version=9, promoted=COPY_ID)
    kept.clock.advance(POLL_MS)
    with pytest.raises(FlushFailedError, match="a copy of its data folder was promoted"):
        await appending
    with pytest.raises(BrokerReadOnlyError):
        await begin_append(kept, 2)


async def test_broker_goes_on_when_an_operator_accepts_its_folder_after_a_promotion(kept: KeptSet):
    """The metaserver names no promoted copy any more, and an empty set."""
    appending = begin_append(kept)
    await asyncio.sleep(0.01)
    kept.stored = CopySet(wanted=2, term=1, version=9)
    kept.clock.advance(POLL_MS)
    await appending
    assert not kept.keeper.is_replaced
    kept.clock.advance(AWAY_MS)
    kept.report()
    await eventually(lambda: kept.stored.members == (COPY_ID,))
    assert kept.asked[-1].term == 1


async def test_health_says_that_a_copy_was_promoted_when_nothing_is_stored_any_more(kept: KeptSet):
    kept.stored = CopySet(wanted=2, term=1, version=9, promoted=COPY_ID)
    kept.clock.advance(POLL_MS)
    await eventually(lambda: kept.keeper.is_replaced)
    assert "a copy of its data folder was promoted" in kept.keeper.problem


async def test_copy_that_has_less_than_before_is_left_out(kept: KeptSet):
    """Its disk was put back to an earlier state, or has lost what it had synced."""
    appending = begin_append(kept)
    await asyncio.sleep(0.01)
    kept.report()
    await appending
    kept.keeper.note_report(COPY_ID, kept.desk.store.log.end - 1)
    await eventually(lambda: kept.stored.members == ())


async def test_copies_are_not_left_out_before_a_metaserver_has_accepted_the_broker(kept: KeptSet):
    """They follow no broker that is not."""
    await kept.stop()
    await kept.desk.store.close()
    again = KeptSet(kept.disk, stored=kept.stored)
    again.is_registered = False
    again.start()
    await eventually(lambda: bool(again.asked))
    again.clock.advance(60_000)
    await asyncio.sleep(0.3)
    assert again.stored.members == (COPY_ID,)
    again.is_registered = True
    await asyncio.sleep(0.3)
    again.clock.advance(2_000)
    await eventually(lambda: again.stored.members == ())
    await again.stop()


async def test_set_is_kept_when_a_metaserver_has_an_unforeseen_fault(kept: KeptSet):
    kept.fault = RuntimeError("a fault of the program")
    kept.clock.advance(POLL_MS)
    await asyncio.sleep(0.3)
    kept.fault = None
    appending = begin_append(kept)
    await asyncio.sleep(0.01)
    kept.clock.advance(2_000)
    await appending
    assert kept.stored.members == ()


async def test_folder_says_that_it_has_copies_when_a_write_has_failed_before(
    kept: KeptSet, monkeypatch: pytest.MonkeyPatch
):
    """The write that takes the word back was done, and told as failed."""

    def fail(files, *, exist: bool) -> None:
        record(files, exist=exist)
        raise StorageError("the folder cannot be synced")

    record = set_keeper.record_copies
    monkeypatch.setattr(set_keeper, "record_copies", fail)
    kept.stored = replace(kept.stored, wanted=1, version=kept.stored.version + 1)
    kept.clock.advance(POLL_MS)
    await eventually(lambda: not has_copies(kept.disk))
    monkeypatch.setattr(set_keeper, "record_copies", record)
    kept.stored = replace(kept.stored, wanted=2, version=kept.stored.version + 1)
    kept.clock.advance(POLL_MS)
    kept.report()
    await eventually(lambda: kept.stored.members == (COPY_ID,))
    assert has_copies(kept.disk)


async def test_broker_without_copies_stores_nothing_more_when_a_copy_was_promoted():
    """It was given up with what the copy lacked."""
    kept = KeptSet(stored=CopySet())
    await kept.desk.host()
    kept.start()
    await begin_append(kept)
    kept.stored = CopySet(term=1, version=1, promoted=COPY_ID)
    kept.report()
    kept.clock.advance(POLL_MS)
    await eventually(lambda: kept.keeper.is_replaced)
    with pytest.raises(FlushFailedError):
        await begin_append(kept, 2)
    await kept.stop()


async def test_clients_wait_after_a_restart_until_copies_have_the_log(kept: KeptSet):
    """Of its end it is not known whether it was durable: a copy may lack it."""
    appending = begin_append(kept)
    await asyncio.sleep(0.01)
    await kept.stop()
    await kept.keeper.close()
    with pytest.raises(FlushFailedError):
        await appending
    await kept.desk.store.close()
    again = KeptSet(kept.disk, stored=kept.stored)
    again.start()
    await eventually(lambda: bool(again.asked))
    await asyncio.sleep(0.05)
    assert not again.copied
    assert not again.keeper.knows_durable_end()
    assert "the copies that acks wait for" in again.keeper.problem
    again.report()
    assert again.copied
    assert again.keeper.knows_durable_end()
    assert again.keeper.problem == ""
    await again.stop()


async def test_clients_wait_no_longer_than_copy_lag_ms_for_a_copy_that_is_gone(kept: KeptSet):
    await kept.stop()
    await kept.desk.store.close()
    again = KeptSet(kept.disk, stored=kept.stored)
    again.start()
    await eventually(lambda: bool(again.asked))
    again.clock.advance(2_000)
    await eventually(lambda: again.copied)
    assert again.stored.members == ()
    await again.stop()


async def test_durable_end_is_told_once_it_is_known(kept: KeptSet):
    kept.clock.advance(POLL_MS)
    await eventually(lambda: kept.asked[-1].durable_end == kept.desk.store.log.end)


async def test_broker_without_copies_asks_now_and_then(caplog):
    """Copies may be wanted later."""
    kept = KeptSet(stored=CopySet())
    kept.start()
    await eventually(lambda: len(kept.asked) == 1)
    kept.report()
    kept.clock.advance(IDLE_POLL_MS)
    await eventually(lambda: len(kept.asked) > 1)
    assert kept.keeper.stored == CopySet()
    assert not has_copies(kept.disk)
    await kept.stop()


async def test_broker_without_copies_acks_when_its_metaserver_does_not_know_sets():
    """A metaserver of the version before."""
    kept = KeptSet()
    kept.error = InvalidRequestError("404 Not Found", unknown_call=1)
    await kept.desk.host()
    kept.start()
    kept.report()
    await begin_append(kept)
    await eventually(lambda: bool(kept.asked))
    await begin_append(kept, 2)
    await kept.stop()


async def test_acks_wait_for_no_copy_when_one_folder_is_wanted_again(kept: KeptSet):
    kept.stored = replace(kept.stored, wanted=1, version=kept.stored.version + 1)
    kept.clock.advance(POLL_MS)
    await eventually(lambda: not has_copies(kept.disk))
    assert kept.stored.members == ()
    await begin_append(kept)


async def test_another_copy_takes_the_place_of_one_that_is_gone(kept: KeptSet):
    kept.clock.advance(SILENT_MS + 1)
    kept.report(OTHER_ID)
    await eventually(lambda: kept.stored.members == (OTHER_ID,))


async def test_copies_that_reported_long_ago_are_forgotten_unless_they_count(kept: KeptSet):
    for number in range(REMEMBERED_MAX + 10):
        kept.clock.advance(1)
        kept.report(f"{number:032}")
    synced = kept.keeper.commitment.synced
    assert len(synced) == REMEMBERED_MAX
    assert {COPY_ID, f"{REMEMBERED_MAX + 9:032}"} < synced.keys()
    assert f"{0:032}" not in synced


async def test_ack_waits_until_as_many_folders_have_it_as_are_asked_for(kept: KeptSet):
    """A late copy stays in the set meanwhile, and acks go on when another one has joined."""
    kept.stored = replace(kept.stored, wanted=3, least=2, version=kept.stored.version + 1)
    kept.clock.advance(POLL_MS)
    await eventually(lambda: kept.keeper.commitment.least == 2)
    appending = begin_append(kept)
    await asyncio.sleep(0.01)
    kept.clock.advance(4_000)
    await asyncio.sleep(0.3)
    assert not appending.done()
    assert kept.stored.members == (COPY_ID,)
    assert "until 2 data folders have everything, and 1 has it" in kept.keeper.problem
    kept.report(OTHER_ID)
    await appending
    await eventually(lambda: kept.stored.members == (OTHER_ID,))
    assert kept.keeper.problem == ""


async def test_broker_acks_when_fewer_folders_are_enough_again():
    kept = KeptSet(stored=CopySet(wanted=3, least=2))
    await kept.desk.host()
    kept.start()
    await eventually(lambda: kept.keeper.commitment.least == 2)
    appending = begin_append(kept)
    await asyncio.sleep(0.3)
    assert not appending.done()
    kept.stored = CopySet(wanted=3, version=1)
    kept.clock.advance(POLL_MS)
    await appending
    await kept.stop()


async def test_copy_on_the_machine_of_the_broker_counts_only_when_that_is_allowed(
    kept: KeptSet, caplog: pytest.LogCaptureFixture
):
    """The log says what is wrong, until it is allowed."""
    kept.keeper.site = Site("m1")
    end = kept.desk.store.log.written_end
    with caplog.at_level("WARNING", "keylane.broker"):
        kept.keeper.note_report(COPY_ID, end, Site("m1"))
        await eventually(lambda: kept.stored.members == ())
        await eventually(lambda: kept.keeper.stored == kept.stored)
        assert kept.keeper.shared_machines() == {
            COPY_ID: f"the copy {COPY_ID} is on the same machine as the broker (m1), so acks do "
            "not wait for it"
        }
        kept.clock.advance(AWAY_MS)
        kept.keeper.note_report(COPY_ID, end, Site("m1"))
        await asyncio.sleep(0.3)
        assert kept.stored.members == ()
        kept.stored = replace(kept.stored, may_share_machine=True)
        kept.clock.advance(POLL_MS)
        kept.keeper.note_report(COPY_ID, end, Site("m1"))
        await eventually(lambda: kept.stored.members == (COPY_ID,))
    logged = [each.getMessage() for each in caplog.records if "same machine" in each.getMessage()]
    assert [each.partition("(m1)")[2] for each in logged] == [
        ", and leaves the set once acks can do without it",
        ", so acks do not wait for it",
    ]


# ── quarantine ────────────────────────────────────────────────────────────────────────────────────
def fall_back(kept: KeptSet) -> None:
    """The database is older, and names another copy; the broker is asked what it knows."""
    kept.stored = replace(
        kept.stored,
        wanted=1,
        members=(OTHER_ID,),
        version=kept.stored.version + 1_000,
        quarantine="the database is older",
    )
    kept.clock.advance(POLL_MS)


async def test_copies_that_counted_count_on_in_quarantine(kept: KeptSet):
    """Not those of an older database; and a late one is not left out."""
    fall_back(kept)
    await eventually(lambda: kept.keeper.quarantine != "")
    assert kept.keeper.commitment.counted == {COPY_ID}
    appending = begin_append(kept)
    await asyncio.sleep(0.01)
    kept.clock.advance(5_000)
    await asyncio.sleep(0.3)
    assert not appending.done()
    assert {request.members for request in kept.asked[-2:]} == {None}
    assert "none may be left out: the database is older" in kept.keeper.problem
    kept.report()
    await appending
    assert has_copies(kept.disk)


async def test_broker_says_which_copies_count_once_they_follow_it_in_quarantine(kept: KeptSet):
    """A report from before the quarantine does not count: the copy may have its place since."""
    kept.report()
    fall_back(kept)
    await eventually(lambda: kept.keeper.quarantine != "")
    kept.clock.advance(QUARANTINE_POLL_MS)
    asked = len(kept.asked)
    await eventually(lambda: len(kept.asked) > asked)
    assert not kept.asked[-1].is_followed
    kept.clock.advance(1)
    kept.report()
    kept.clock.advance(QUARANTINE_POLL_MS)
    await eventually(lambda: kept.asked[-1].is_followed)
    known = kept.asked[-1].known
    assert known is not None
    assert (known.members, known.version) == ((COPY_ID,), kept.stored.version)
    kept.stored = replace(
        kept.stored, wanted=2, members=(COPY_ID,), version=kept.stored.version + 1, quarantine=""
    )
    kept.clock.advance(QUARANTINE_POLL_MS)
    await eventually(lambda: kept.keeper.quarantine == "")
    appending = begin_append(kept)
    await asyncio.sleep(0.01)
    kept.clock.advance(2_000)
    await appending
    assert kept.stored.members == ()


async def test_restarted_broker_counts_the_copies_of_the_database_in_quarantine(kept: KeptSet):
    """It knows no others, and says nothing of them before they have its log."""
    await kept.stop()
    fall_back(kept)
    again = KeptSet(kept.disk, stored=kept.stored)
    again.start()
    await eventually(lambda: again.keeper.commitment.counted == {OTHER_ID})
    again.clock.advance(QUARANTINE_POLL_MS)
    asked = len(again.asked)
    await eventually(lambda: len(again.asked) > asked)
    assert not again.asked[-1].is_followed
    again.clock.advance(1)
    again.report(OTHER_ID)
    again.clock.advance(QUARANTINE_POLL_MS)
    await eventually(lambda: again.asked[-1].is_followed)
    await again.stop()
