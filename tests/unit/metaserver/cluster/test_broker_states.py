"""The states of broker groups as shown to operators, and the error if none can host partitions."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.brokers import (
    broker_views,
    cordon_broker,
    no_host_error,
    refused_views,
    store_refusal,
    store_report,
)
from keylane.metaserver.cluster.subjects import plan_subject
from keylane.metaserver.sql.schema import lost_folders, partitions
from keylane.protocol.control import BrokerHeartbeat, CreateSubject
from keylane.protocol.errors import Reason
from keylane.protocol.membership.views import BrokerView
from support.raising import raises
from support.sql.rows import Rows

TTL_MS = 10_000
FULL = "the disk is 91 % full, and 90 % is the limit"


@pytest.fixture
def rows() -> Rows:
    return Rows()


def report(rows: Rows, group: str, problem: str = "") -> None:
    heartbeat = BrokerHeartbeat(
        broker_group=group,
        broker_id=group,
        address=f"{group}:1",
        writable=not problem,
        problem=problem,
    )
    rows.run(store_report, heartbeat, ttl_ms=TTL_MS)


def views(rows: Rows) -> dict[str, BrokerView]:
    return {view.broker_group: view for view in rows.run(broker_views)}


def test_view_says_why_a_broker_takes_no_writes_until_it_takes_them_again(rows: Rows) -> None:
    report(rows, "g1", FULL)
    full = views(rows)["g1"]
    assert (full.available, full.writable, full.gets_partitions) == (True, False, False)
    assert full.state == f"takes no writes: {FULL}"
    report(rows, "g1")
    mended = views(rows)["g1"]
    assert (mended.state, mended.problem, mended.gets_partitions) == ("available", "", True)


def test_view_says_for_how_long_a_broker_has_taken_no_writes(rows: Rows) -> None:
    report(rows, "g1")
    assert views(rows)["g1"].refusing_ms is None
    report(rows, "g1", FULL)
    for problem in (FULL, "acks wait for copies"):
        rows.clock.advance(1_000)
        report(rows, "g1", problem)
    assert views(rows)["g1"].refusing_ms == 2_000
    report(rows, "g1")
    assert views(rows)["g1"].refusing_ms is None


def test_view_of_a_silent_broker_says_for_how_long_also_when_it_took_no_writes(rows: Rows) -> None:
    report(rows, "g1", FULL)
    rows.clock.advance(TTL_MS + 2_500)
    silent = views(rows)["g1"]
    assert (silent.state, silent.gets_partitions) == ("silent for 12 s", False)


def test_view_of_a_broker_older_than_reasons_says_that_it_takes_no_writes(rows: Rows) -> None:
    older = BrokerHeartbeat(broker_group="g1", broker_id="g1", address="g1:1", writable=False)
    rows.run(store_report, older, ttl_ms=TTL_MS)
    assert views(rows)["g1"].state == "takes no writes"


def test_creation_says_of_each_broker_why_it_can_take_no_partition(rows: Rows) -> None:
    report(rows, "g1")
    rows.clock.advance(TTL_MS + 1_000)
    report(rows, "g2", FULL)
    report(rows, "g3")
    rows.run(cordon_broker, "g3", True)
    with raises(Reason.NOT_ENOUGH_BROKERS) as caught:
        rows.run(plan_subject, CreateSubject(subject="s"), subjects_max=10)
    assert caught.value.message == (
        "no broker group can take new partitions: g1 is silent for 11 s, "
        f"g2 takes no writes: {FULL}, g3 is cordoned"
    )
    others = rows.run(no_host_error, excluded="g2")
    assert "no other broker group" in others.message
    assert "g2" not in others.message


def test_view_says_whether_a_broker_has_partitions_that_have_not_expired(rows: Rows) -> None:
    report(rows, "g1")
    rows.run(plan_subject, CreateSubject(subject="s"), subjects_max=10)
    report(rows, "g2")
    assert {name: view.has_partitions for name, view in views(rows).items()} == {
        "g1": True,
        "g2": False,
    }
    rows.run(lambda connection: connection.execute(sa.update(partitions).values(state="expired")))
    assert not views(rows)["g1"].has_partitions


def test_creation_says_that_no_broker_has_reported_itself_yet(rows: Rows) -> None:
    with raises(Reason.NOT_ENOUGH_BROKERS, match="no broker has reported itself yet"):
        rows.run(plan_subject, CreateSubject(subject="s"), subjects_max=10)


def refuse(rows: Rows, broker_id: str, opening: str = "") -> str:
    """The advice about a broker of g1 that is refused."""
    heartbeat = BrokerHeartbeat(
        broker_group="g1", broker_id=broker_id, address="elsewhere:1", opening=opening
    )
    rows.run(store_refusal, heartbeat, "not this one", ttl_ms=TTL_MS)
    (refused,) = rows.run(refused_views)
    return str(refused.advice)


def test_list_names_the_way_out_for_each_folder_that_is_refused(rows: Rows) -> None:
    """Another folder, an older copy, a copy beside the group's own broker, and one whose loss was
    accepted.
    """
    report(rows, "g1")
    assert refuse(rows, "g1", "older").startswith(
        "the folder is in use elsewhere: stop this broker, unless it runs with failover"
    )
    assert "evacuate g1 --accept-loss" in refuse(rows, "another")
    rows.clock.advance(TTL_MS + 1)
    assert "keylane broker accept g1" in refuse(rows, "g1", "older")
    lost = {"broker_id": "g1", "broker_group": "g1"}
    rows.run(lambda connection: connection.execute(sa.insert(lost_folders).values(lost)))
    assert refuse(rows, "g1", "older") == "start the broker with an empty folder"
