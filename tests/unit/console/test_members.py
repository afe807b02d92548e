"""Rows of consumers, whose order is that of the metaserver and changes."""

from msgspec.structs import replace

from keylane.admin import GroupDescription, GroupMember
from keylane.console.trends import Trends
from keylane.console.views.groups import group
from keylane.protocol.routing import ConsumeStrategy

FIRST, SECOND = (
    GroupMember(
        client="same name",
        partitions=number,
        heard_ms=1,
        expires_in_ms=1,
        session=f"s{number}",
        suspended=number == 1,
    )
    for number in (1, 2)
)
DESCRIBED = GroupDescription(
    subject="orders",
    group="billing",
    strategy=ConsumeStrategy.EXCLUSIVE,
    sessions=2,
    lag=0,
    partitions=(),
    members=(FIRST, SECOND),
)


class OneGroup:
    """A feed of a group; the cluster is not asked."""

    def __init__(self, described: GroupDescription) -> None:
        self.described = described
        self.trends = Trends()

    async def group(self, _subject: str, _group: str) -> GroupDescription:
        return self.described

    async def cluster(self) -> None:
        return None


async def live_cells(described: GroupDescription) -> dict[str, object]:
    page = await group(OneGroup(described), {"subject": "orders", "group": "billing"}, {})  # type: ignore[arg-type]
    return page.live()


async def test_member_keeps_its_cells_when_another_comes_before_it():
    cells = await live_cells(DESCRIBED)
    assert cells["members.s1.4"] == ("suspended", "warn")
    swapped = await live_cells(replace(DESCRIBED, members=(SECOND, FIRST)))
    assert swapped == cells
    left = await live_cells(replace(DESCRIBED, members=(SECOND,), sessions=1))
    assert left["members.s2.1"] == ("2", "")
    assert not any(name.startswith("members.s1") for name in left)
