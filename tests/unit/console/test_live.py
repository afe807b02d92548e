import asyncio

import msgspec
import pytest

from keylane.console import live as live_module
from keylane.console.live import EVENT_BYTES_MAX, Live, encode_error
from keylane.console.page import Cell, Page, PageColumn, Table, TableRow
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import OverloadedError, StorageError, UnauthenticatedError


class CountedPage:
    """A page that is built again and again."""

    def __init__(self) -> None:
        self.built = 0
        self.rows = 1
        self.error: Exception | None = None
        self.begun = asyncio.Event()
        """Set when a build begins."""
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self) -> Page:
        self.built += 1
        self.begun.set()
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        rows = tuple(
            TableRow(str(number), (Cell("fixed"), Cell(f"{self.built}")))
            for number in range(self.rows)
        )
        columns = (PageColumn("a"), PageColumn("b"))
        table = Table(name="t", caption="c", columns=columns, rows=rows, empty="")
        return Page(title="p", tables=(table,))


async def next_event(stream) -> dict:
    while True:
        data = await asyncio.wait_for(anext(stream), 10)
        if data.startswith(b"data: "):
            return msgspec.json.decode(data.removeprefix(b"data: "))


async def test_first_event_has_every_cell_and_later_ones_what_changed():
    live, source = Live(SystemClock()), CountedPage()
    stream = live.stream("p", source)
    assert set((await next_event(stream))["cells"]) == {"t.0.0", "t.0.1"}
    assert set((await next_event(stream))["cells"]) == {"t.0.1"}
    await stream.aclose()


async def test_page_is_built_once_for_all_who_see_it_and_not_for_nobody():
    live, source = Live(SystemClock()), CountedPage()
    streams = [live.stream("p", source) for _ in range(20)]
    events = await asyncio.gather(*map(next_event, streams))
    assert len({str(each["cells"]) for each in events}) == 1
    assert source.built == 1
    for each in streams:
        await each.aclose()
    await asyncio.sleep(1.3)
    assert source.built == 1


async def test_browser_that_comes_later_gets_every_cell():
    live, source = Live(SystemClock()), CountedPage()
    first = live.stream("p", source)
    for _ in range(2):
        await next_event(first)
    later = live.stream("p", source)
    assert set((await next_event(later))["cells"]) == {"t.0.0", "t.0.1"}
    for each in (first, later):
        await each.aclose()


async def open_second_tab_in_a_build(live: Live, source: CountedPage, *, seen: int):
    """Return the first two events of a tab that opens in the build after `seen` samples."""
    first, second = live.stream("p", source), live.stream("p", source)
    for _ in range(seen):
        await next_event(first)
    source.may_end.clear()
    source.begun.clear()
    other = asyncio.ensure_future(next_event(first))
    await asyncio.wait_for(source.begun.wait(), 5)
    event = asyncio.ensure_future(next_event(second))
    await asyncio.sleep(0.05)
    source.may_end.set()
    found = [await event, await next_event(second)]
    await other
    for each in (first, second):
        await each.aclose()
    return found


@pytest.mark.parametrize("seen", [0, 1, 2, 3])
async def test_tab_that_opens_while_a_page_is_built_misses_no_sample(seen):
    live, source = Live(SystemClock()), CountedPage()
    events = await open_second_tab_in_a_build(live, source, seen=seen)
    assert set(events[0]["cells"]) == {"t.0.0", "t.0.1"}
    values = [int(each["cells"]["t.0.1"][0]) for each in events]
    assert values[1] == values[0] + 1


async def test_tab_that_opens_after_a_failed_sample_is_not_shown_the_one_before_as_new():
    live, source = Live(SystemClock()), CountedPage()
    first = live.stream("p", source)
    for _ in range(2):
        await next_event(first)
    source.error = StorageError("the database does not answer")
    await next_event(first)
    second = live.stream("p", source)
    assert (await next_event(second))["problem"] == "the database does not answer"
    for each in (first, second):
        await each.aclose()


async def test_page_that_cannot_be_built_says_why_and_comes_back():
    live, source = Live(SystemClock()), CountedPage()
    source.error = StorageError("the database does not answer")
    stream = live.stream("p", source)
    assert (await next_event(stream))["problem"] == "the database does not answer"
    source.error = None
    assert "cells" in await next_event(stream)
    source.error = UnauthenticatedError("no", problem="no token")
    assert (await next_event(stream))["signed_out"]
    await stream.aclose()


async def test_event_that_would_be_too_large_has_the_page_drawn_anew():
    live, source = Live(SystemClock()), CountedPage()
    source.rows = 10_000
    stream = live.stream("p", source)
    event = await next_event(stream)
    assert event["structure"] == "too large"
    assert len(str(event)) < EVENT_BYTES_MAX
    await stream.aclose()


async def test_streams_end_when_the_console_closes():
    live, source = Live(SystemClock()), CountedPage()
    stream = live.stream("p", source)
    await next_event(stream)
    waiting = asyncio.ensure_future(next_event(stream))
    await asyncio.sleep(0.05)
    await live.close()
    try:
        await asyncio.wait_for(waiting, 5)
    except StopAsyncIteration:
        pass
    else:
        raise AssertionError("the stream goes on")


async def test_stream_above_the_limit_is_refused_with_a_typed_error(monkeypatch):
    monkeypatch.setattr(live_module, "STREAMS_MAX", 1)
    live, source = Live(SystemClock()), CountedPage()
    first = live.stream("p", source)
    await next_event(first)
    with pytest.raises(OverloadedError) as caught:
        await anext(live.stream("p", source))
    assert caught.value.limit == 1
    event = msgspec.json.decode(encode_error(caught.value).removeprefix(b"data: "))
    assert event == {"problem": caught.value.message, "code": OverloadedError.code}
    await first.aclose()
    again = live.stream("p", source)
    assert "cells" in await next_event(again)
    await again.aclose()
