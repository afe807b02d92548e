"""Each change of a broker group is one line, and what stays as it is has none."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from keylane.metaserver.cluster.broker_watch import describe_changes
from keylane.protocol.control import BrokerView

VIEW = BrokerView(broker_group="g1", address="a:7101", available=True, silent_ms=0, cordoned=False)
SILENT = replace(VIEW, available=False, silent_ms=12_000)


def lines(before: BrokerView | None, *views: BrokerView) -> list[tuple[int, str]]:
    return [
        tuple(line) for line in describe_changes({} if before is None else {"g1": before}, views)
    ]


def test_broker_that_is_new_is_registered() -> None:
    assert lines(None, VIEW) == [(logging.INFO, "broker group g1 is registered at a:7101")]


def test_broker_that_stays_is_not_named_again() -> None:
    assert lines(VIEW, VIEW) == lines(SILENT, SILENT) == []


def test_broker_that_falls_silent_and_comes_back_is_a_warning_each() -> None:
    silent = "broker group g1 at a:7101 is silent: nothing was heard for 12 s"
    assert lines(VIEW, SILENT) == [(logging.WARNING, silent)]
    assert lines(SILENT, VIEW) == [(logging.WARNING, "broker group g1 is heard again, at a:7101")]


def test_broker_at_another_address_has_moved() -> None:
    moved = replace(VIEW, address="b:7101")
    assert lines(VIEW, moved) == [(logging.INFO, "broker group g1 has moved to b:7101")]


def test_broker_in_place_of_a_silent_one_is_named_with_both_addresses() -> None:
    taken = replace(VIEW, address="b:7101")
    text = "broker group g1 is served at b:7101 now, in place of a:7101"
    assert lines(SILENT, taken) == [(logging.WARNING, text)]


def test_first_look_names_only_silent_brokers() -> None:
    assert describe_changes(None, [VIEW]) == []
    (line,) = describe_changes(None, [SILENT])
    assert line.level == logging.WARNING
