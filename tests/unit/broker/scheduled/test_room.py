"""The room of a subject among the scheduled messages of a broker."""

from __future__ import annotations

import asyncio

import pytest

from keylane.protocol.errors import Reason
from keylane.testing.machines.disk import SimDisk
from support.raising import is_a, raises
from support.scheduling import message, open_scheduler


@pytest.mark.parametrize("limit", ["count_max", "bytes_max"])
async def test_subject_keeps_room_for_others_when_it_schedules_without_end(limit):
    """One subject took all 256 MiB for 300 days; others find half of what is free, also while
    messages are written.
    """
    disk, size = SimDisk(), message(b"0").size
    limits = {limit: 16 if limit == "count_max" else 16 * size}
    scheduler = open_scheduler(disk, **limits)
    outcomes = await asyncio.gather(
        *(scheduler.schedule([message(b"%d" % (each % 10), each)]) for each in range(10)),
        return_exceptions=True,
    )
    assert [is_a(each, Reason.SCHEDULE_FULL) for each in outcomes] == [False] * 8 + [True] * 2
    error = outcomes[-1]
    assert (error.subject, error.limit) == ("s", 8 if limit == "count_max" else 8 * size)
    assert "cancel some" in error.hint
    await scheduler.close()

    scheduler = open_scheduler(disk, **limits)  # the shares are known at a start
    with raises(Reason.SCHEDULE_FULL, match="of subject 's'"):
        await scheduler.schedule([message(b"8")])
    for name in (b"a", b"b", b"c", b"d"):
        await scheduler.schedule([message(name, subject="t")])
    with raises(Reason.SCHEDULE_FULL, match="of subject 't'"):
        await scheduler.schedule([message(b"e", subject="t")])
    for each in range(5):
        await scheduler.cancel(message(b"%d" % each).scheduled_id)
    await scheduler.schedule([message(b"e", subject="t")])
    await scheduler.close()


async def test_messages_over_the_limits_are_refused_all_of_them():
    scheduler = open_scheduler(SimDisk(), count_max=3)
    with raises(Reason.SCHEDULE_FULL) as refused:
        await scheduler.schedule([message(b"%d" % each) for each in range(4)])
    assert (refused.value.limit, refused.value.broker_group) == (3, "g1")
    assert scheduler.view()["count"] == 0
    await scheduler.schedule([message(b"%d" % each) for each in range(2)])
    await scheduler.schedule([message(b"other", subject="other")])
    with raises(Reason.SCHEDULE_FULL, match="stores 3 scheduled messages"):
        await scheduler.schedule([message(b"more", subject="third")])
    scheduler = open_scheduler(SimDisk(), bytes_max=1_000)
    with raises(Reason.SCHEDULE_FULL, match="bytes"):
        await scheduler.schedule([message(bytes(1_000))])


async def test_subjects_of_a_pattern_have_room_together_when_it_has_a_limit():
    """Also while messages are written, and behind a restart; other subjects are not of it."""
    disk, size = SimDisk(), message(b"0", subject="t.0").size
    scheduler = open_scheduler(disk)
    scheduler.limits = lambda: {"t.1": size, "t.*": 4 * size}
    outcomes = await asyncio.gather(
        *(scheduler.schedule([message(b"%d" % n, subject=f"t.{n % 3}")]) for n in range(6)),
        return_exceptions=True,
    )
    refused = [each for each in outcomes if is_a(each, Reason.SCHEDULE_FULL)]
    assert [each.pattern for each in refused] == ["t.1", "t.*"]
    assert [each.limit for each in refused] == [size, 4 * size]
    assert "--scheduled-bytes" in refused[0].hint
    await scheduler.schedule([message(b"a", subject="other")])
    await scheduler.close()

    scheduler = open_scheduler(disk)
    scheduler.limits = lambda: {"t.*": 4 * size}
    with raises(Reason.SCHEDULE_FULL, match=r"of 't\.\*'; the limit"):
        await scheduler.schedule([message(b"b", subject="t.9")])
    assert await scheduler.schedule([message(b"0", subject="t.0")]) == [True]
    await scheduler.cancel(message(b"0").scheduled_id)
    await scheduler.schedule([message(b"b", subject="t.9")])
    await scheduler.close()
