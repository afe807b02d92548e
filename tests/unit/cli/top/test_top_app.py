"""The screen as plain text, as its user sees it, and its keys."""

from __future__ import annotations

import asyncio
import re

import pytest
from textual.app import App
from textual.pilot import Pilot

from keylane.admin import Cause, Explanation, GroupDescription, PartitionProgress
from keylane.cli.top.app import TopApp
from keylane.cli.top.asker import pause_s
from keylane.cli.top.board import Board, GroupDetail
from keylane.protocol.routing import ConsumeStrategy, PartitionState
from support.boards import ADDRESSES, board, figures

NOW_S = 12.0
CAUSE = Cause(
    code="no_consumer",
    text="no consumer of billing has sent a heartbeat for 12 s",
    step="start a consumer of orders in the group billing",
)
EXPLANATION = Explanation(subject="orders", group="billing", key=None, causes=(CAUSE,))


class StillAsker:
    """An asker whose board does not change."""

    def __init__(self, made: Board) -> None:
        self.board = made
        self.opened: list[tuple[str, str]] = []

    def now_s(self) -> float:
        return NOW_S

    async def run(self) -> None:
        await asyncio.Event().wait()

    def open_group(self, subject: str, group: str) -> GroupDetail:
        self.opened.append((subject, group))
        partition = PartitionProgress(
            partition_id=1,
            name="p1",
            state=PartitionState.OPEN,
            broker_group="g1",
            owner=None,
            session=None,
            token=0,
            expires_in_ms=None,
            offset=40,
            acked_above=0,
            next_offset=60,
            lag=20,
            parked=0,
        )
        return GroupDetail(
            subject,
            group,
            description=GroupDescription(
                subject=subject,
                group=group,
                strategy=ConsumeStrategy.EXCLUSIVE,
                sessions=0,
                lag=20,
                partitions=(partition,),
            ),
            explanation=EXPLANATION,
            heard_s=NOW_S,
        )

    def close_group(self) -> None:
        self.opened.append(("", ""))


def lagging() -> Board:
    """Two brokers, and a group whose lag of 20 has not fallen for 12 s; another that lags less."""
    made = board(seconds=int(NOW_S), lag=10)
    made.note_explanation(("orders", "billing"), EXPLANATION)
    made.note_subjects({"orders": 4, "unused": 2})
    return made


def text_of(app: App[None]) -> str:
    """What is on the screen, without the time and spaces at the ends of lines."""
    strips = app.screen._compositor.render_strips()
    lines = ("".join(segment.text for segment in strip).rstrip() for strip in strips)
    return re.sub(r"\d\d:\d\d:\d\d", "TIME", "\n".join(lines)).rstrip()


async def settled(pilot: Pilot[None]) -> str:
    await pilot.pause()
    await pilot.pause()
    return text_of(pilot.app)


OVERVIEW = """\
keylane top  127.0.0.1:7000  TIME
! billing on orders: No consumer of billing has sent a heartbeat for 12 s
  → start a consumer of orders in the group billing
  Brokers (2)
 broker↑  state      stored/s   handed/s   folders   disk   copy lag   free
 g1       available         50         25         1    30%          -  70 GB
 g2       available         50         25         1    30%          -  70 GB
▶ Groups (1)
 group    subject   lag↓  oldest   acked/s   lag/s   cons.   parked
 billing  orders      20     12 s       100       0       -        0





  Subjects (2)
 subject   stored/s↓  bytes/s   handed/s   partitions   groups   lag
 orders          100     10 kB         50            4        1    20
 unused            -         -          -            2        0     0




 ⏎ open  tab next table  s sort  r reverse  / filter  q quit"""


async def test_overview_says_what_is_wrong_first_and_fits_into_a_small_terminal():
    app = TopApp(StillAsker(lagging()))
    async with app.run_test(size=(80, 24)) as pilot:
        assert await settled(pilot) == OVERVIEW


async def test_overview_says_that_it_looks_until_it_can_know_that_nothing_is_wrong():
    for seconds, line in (
        (5, "Looking: it takes 10 s to see whether a group is stuck."),
        (12, "Nothing is wrong that the servers know of."),
    ):
        made = board(seconds=seconds)
        asker = StillAsker(made)
        asker.now_s = lambda seconds=seconds: float(seconds)
        async with TopApp(asker).run_test(size=(80, 24)) as pilot:
            assert (await settled(pilot)).splitlines()[1] == line


async def test_wide_screen_has_all_columns_and_more_rows():
    app = TopApp(StillAsker(lagging()))
    async with app.run_test(size=(200, 60)) as pilot:
        text = await settled(pilot)
        assert " free   partitions" in text
        assert len(text.splitlines()) == 60
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert await settled(pilot) == OVERVIEW


async def test_screen_without_colour_has_the_same_text_and_no_colour(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    app = TopApp(StillAsker(lagging()))
    async with app.run_test(size=(80, 24)) as pilot:
        assert await settled(pilot) == OVERVIEW
        shown = [
            segment.style
            for strip in app.screen._compositor.render_strips()
            for segment in strip.apply_filter(app._filters[-1], app.screen.background_colors[1])
            if segment.style is not None
        ]
        assert all(style.color is None or style.color.is_default for style in shown)
        assert any(style.reverse for style in shown), "the row at the cursor"


async def test_group_is_opened_with_its_causes_and_partitions_and_left_again():
    asker = StillAsker(lagging())
    app = TopApp(asker)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        text = await settled(pilot)
        assert asker.opened == [("orders", "billing")]
        assert text.startswith("keylane top  billing on orders  lag 20  consumers 0\n! No consumer")
        assert re.search(r" 1 +open +g1 +- +40 +60 +20", text)
        await pilot.press("escape")
        assert await settled(pilot) == OVERVIEW
        assert asker.opened[-1] == ("", "")


async def test_keys_sort_reverse_and_filter_the_table_that_has_them():
    app = TopApp(StillAsker(lagging()))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("tab")
        assert "▶ Subjects" in await settled(pilot)
        await pilot.press("s", "r")
        assert "bytes/s↑" in await settled(pilot)
        await pilot.press("slash", "u", "s", "r")
        assert 'Subjects (0 of 2, filter "usr")' in await settled(pilot)
        await pilot.press("backspace", "backspace", "n", "enter")
        text = await settled(pilot)
        assert '▶ Subjects (1 of 2, filter "un")' in text
        assert "bytes/s↑" in text, "keys that were typed into the filter did nothing else"
        await pilot.press("escape")
        assert "▶ Subjects (2)" in await settled(pilot)


def with_lags(made: Board, lags: dict[str, float]) -> None:
    """Note the lags of more groups."""
    more = figures(NOW_S, stored=600, lag=10)
    lags_by_labels = {("orders", group): lag for group, lag in lags.items()}
    more.values["keylane_group_lag_messages"].update(lags_by_labels)
    made.note_figures(ADDRESSES[0], more)


async def test_cursor_stays_at_the_group_that_was_chosen_while_the_order_changes():
    made = lagging()
    with_lags(made, {"audit": 30.0})
    asker = StillAsker(made)
    app = TopApp(asker)
    async with app.run_test(size=(80, 24)) as pilot:
        assert re.search(r"audit .*\n billing", await settled(pilot))
        await pilot.press("down")
        for lags in ({"audit": 30.0, "search": 40.0}, {"audit": 5.0}, {"audit": 30.0}):
            with_lags(made, lags)
            app.screen.show()
            await settled(pilot)
        await pilot.press("enter")
        await settled(pilot)
        assert asker.opened == [("orders", "billing")]


async def test_greatest_lag_stays_in_sight_until_the_user_moves_the_cursor():
    made = lagging()
    asker = StillAsker(made)
    app = TopApp(asker)
    async with app.run_test(size=(100, 24)) as pilot:
        await settled(pilot)
        for count in (20, 40):
            with_lags(made, {f"group-{number}": 100.0 + number for number in range(count)})
            app.screen.show()
            assert re.search(rf"group +subject .*\n group-{count - 1} ", await settled(pilot))
        await pilot.press("enter")
        await settled(pilot)
        assert asker.opened == [("orders", "group-39")]


async def test_markup_and_control_characters_are_shown_as_they_are():
    made = lagging()
    nasty = Cause(code="c", text="[red]a\x1b[2J\u202eb[/red]", step="[link=x]")
    made.note_explanation(
        ("orders", "billing"),
        Explanation(subject="orders", group="billing", key=None, causes=(nasty,)),
    )
    app = TopApp(StillAsker(made))
    async with app.run_test(size=(80, 24)) as pilot:
        text = await settled(pilot)
        assert r"! billing on orders: [red]a\x1b[2J\u202eb[/red]" in text
        assert "  → [link=x]" in text


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_screen_ends_with_its_key(key):
    app = TopApp(StillAsker(lagging()))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press(key)
    assert app.return_code == 0


@pytest.mark.parametrize(("took_s", "rest_s"), [(0.0, 1.0), (0.1, 0.9), (0.5, 4.5)])
def test_slow_server_is_asked_less_often(took_s, rest_s):
    assert pause_s(took_s, 1.0) == pytest.approx(rest_s)
