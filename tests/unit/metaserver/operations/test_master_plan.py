"""Plans that spread the masters of broker groups over hosts, by example."""

from __future__ import annotations

import pytest

from keylane.metaserver.operations.master_plan import PlacedMaster, place_master, plan_masters
from keylane.protocol.control import Health


def placed(*rows: tuple[str, ...]) -> list[PlacedMaster]:
    """Broker groups g1, g2, …: the host that serves each, and those with a copy of it."""
    return [
        PlacedMaster(
            broker_group=f"g{number}",
            host=host,
            copies={copy: f"g{number} on {copy}" for copy in copies},
        )
        for number, (host, *copies) in enumerate(rows, 1)
    ]


@pytest.mark.parametrize(
    ("rows", "planned"),
    [
        ([("a", "b"), ("a", "b")], [("g1", "b")]),
        ([("a", "b"), ("b", "a")], []),
        ([("a", "b"), ("a", "b"), ("b", "a")], []),
        ([("a", "b"), ("a", "c"), ("a", "b")], [("g1", "b"), ("g2", "c")]),
        ([("a",), ("a",)], []),
        # c has no copy of a's groups: b gives one of its own to c, and gets one from a
        ([("a", "b"), ("a", "b"), ("b", "c")], [("g1", "b"), ("g3", "c")]),
    ],
)
def test_hosts_serve_as_many_broker_groups_as_others_when_copies_are_there(rows, planned):
    found = plan_masters(placed(*rows))
    assert sorted((each.broker_group, each.target) for each in found) == planned
    for each in found:
        assert each.copy_id == f"{each.broker_group} on {each.target}"
        assert each.source != each.target


def test_reason_names_both_hosts():
    (found,) = plan_masters(placed(("a", "b"), ("a", "b")))
    assert found.reason == "a serves 2 broker groups, b 0"


def test_plan_is_empty_when_a_set_lacks_a_copy():
    missing = PlacedMaster(broker_group="g9", host="b", copies={}, is_complete=False)
    assert plan_masters([*placed(("a", "b"), ("a", "b")), missing]) == []


def test_places_are_what_a_broker_says_of_its_set_and_its_own_address():
    def health(**details: object) -> Health:
        return Health(program="broker", ready=True, reason="", details=details)

    copies = {
        "1" * 32: {"in_set": True, "machine": "b"},
        "2" * 32: {"in_set": False, "machine": "c"},
        "3" * 32: {"in_set": True},
    }
    found = place_master(
        "g1", "a.example:7100", health(copies=copies, machine="a"), is_complete=True
    )
    assert (found.host, found.copies) == ("a", {"b": "1" * 32})
    found = place_master("g1", "[::1]:7100", health(), is_complete=False)
    assert (found.host, found.copies, found.is_complete) == ("[::1]", {}, False)
