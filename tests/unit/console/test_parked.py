"""Pages of a million parked keys."""

from types import SimpleNamespace

from keylane.admin import (
    GroupDescription,
    ParkedKeyView,
    ParkedPage,
    ParkState,
    PartitionProgress,
)
from keylane.console.page import ROWS_MAX
from keylane.console.views.parked import parked
from keylane.protocol.routing import ConsumeStrategy, PartitionState

PARTITIONS, KEYS = 100, 10_000


def progress(number: int) -> PartitionProgress:
    return PartitionProgress(
        partition_id=number,
        name=f"p{number}",
        state=PartitionState.OPEN,
        broker_group="g1",
        owner=None,
        session=None,
        token=1,
        expires_in_ms=None,
        offset=0,
        acked_above=0,
        next_offset=KEYS,
        lag=0,
        parked=KEYS if number % 2 else 0,
    )


class ManyParked:
    """A feed of a group that has parked 10,000 keys on every other partition of 200."""

    def __init__(self) -> None:
        self.admin = SimpleNamespace(parked_page=self._parked_page)
        self.asked: list[int] = []
        self.read = 0

    async def group(self, subject: str, group: str) -> GroupDescription:
        return GroupDescription(
            subject=subject,
            group=group,
            strategy=ConsumeStrategy.EXCLUSIVE,
            sessions=0,
            lag=0,
            partitions=tuple(progress(number) for number in range(1, 2 * PARTITIONS + 1)),
        )

    async def _parked_page(
        self, _subject: str, _group: str, partition_id: int, *, first: int, count: int
    ) -> ParkedPage:
        self.asked.append(partition_id)
        end = min(first + count, KEYS)
        keys = tuple(
            ParkedKeyView(
                partition_id=partition_id,
                key=b"%d-%d" % (partition_id, number),
                state=ParkState.PARKED,
                messages=1,
                since_ms=0,
                failure=None,
                first_source=partition_id,
                first_offset=number,
            )
            for number in range(first, end)
        )
        self.read += len(keys)
        return ParkedPage(keys=keys, following=end if end < KEYS else None)


async def page_of(feed: ManyParked, after: str = ""):
    query = {"after": after} if after else {}
    return await parked(feed, {"subject": "s", "group": "g"}, query)  # type: ignore[arg-type]


async def test_page_of_a_million_keys_reads_only_its_own_and_leads_to_the_next():
    feed = ManyParked()
    page = await page_of(feed)
    (table,) = page.tables
    assert len(table.rows) == ROWS_MAX
    assert table.rows[0].cells[0].text == "1-0"
    assert (feed.asked, feed.read) == ([1], ROWS_MAX)
    assert table.pager is not None
    assert table.pager.after.endswith(f"after=1.{ROWS_MAX}")


async def test_pages_show_every_key_once_across_partitions():
    feed = ManyParked()
    seen, after = [], f"1.{KEYS - ROWS_MAX - 20}"
    for _ in range(3):
        (table,) = (await page_of(feed, after)).tables
        seen += [row.cells[0].text for row in table.rows]
        after = table.pager.after.partition("after=")[2]
    expected = [f"1-{number}" for number in range(KEYS - ROWS_MAX - 20, KEYS)]
    expected += [f"3-{number}" for number in range(3 * ROWS_MAX - len(expected))]
    assert seen == expected


async def test_last_page_leads_nowhere():
    (table,) = (await page_of(ManyParked(), f"199.{KEYS - 5}")).tables
    assert len(table.rows) == 5
    assert table.pager.after == ""
    (table,) = (await page_of(ManyParked(), f"199.{KEYS - ROWS_MAX}")).tables
    assert table.pager.after == ""


async def test_place_that_is_nonsense_is_the_first_page():
    for after in ("x", "-1.2", ".", "1.x"):
        (table,) = (await page_of(ManyParked(), after)).tables
        assert table.rows[0].cells[0].text == "1-0"
