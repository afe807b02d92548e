"""Plans that spread masters over hosts: as even as any choice of hosts is, and repeatable."""

from collections import Counter
from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from keylane.metaserver.operations.master_plan import PlacedMaster, plan_masters

HOSTS = ("a", "b", "c", "d")


@st.composite
def layouts(draw):
    count = draw(st.integers(1, 5))
    masters = []
    for number in range(count):
        host, *others = draw(st.permutations(HOSTS))
        copies = others[: draw(st.integers(0, 3))]
        masters.append(
            PlacedMaster(
                broker_group=f"g{number}", host=host, copies={each: each * 3 for each in copies}
            )
        )
    return masters


def unevenness(masters):
    """The sum of squares of how many broker groups each host serves."""
    return sum(load * load for load in Counter(each.host for each in masters).values())


def after(masters, planned):
    """What the hand-overs make of it: the host before has a copy."""
    targets = {each.broker_group: each.target for each in planned}
    for master in masters:
        target = targets.get(master.broker_group, master.host)
        hosts = {master.host, *master.copies} - {target}
        yield replace(master, host=target, copies={each: each * 3 for each in hosts})


@given(layouts())
def test_plan_is_as_even_as_an_exhaustive_search_finds(masters):
    planned = plan_masters(masters)
    by_group = {each.broker_group: each for each in masters}
    assert len({each.broker_group for each in planned}) == len(planned)
    for each in planned:
        assert each.source == by_group[each.broker_group].host
        assert by_group[each.broker_group].copies[each.target] == each.copy_id
    result = list(after(masters, planned))
    choices = product(*({each.host, *each.copies} for each in masters))
    best = min(
        unevenness([replace(each, host=host) for each, host in zip(masters, hosts, strict=True)])
        for hosts in choices
    )
    assert unevenness(result) == best
    assert plan_masters(result) == []
    assert plan_masters(reversed(masters)) == planned
