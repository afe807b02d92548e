"""`keylane top` on real servers: by its keys in this process, and at a terminal of its own."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from textual.pilot import Pilot

from keylane import Admin, Producer
from keylane.cli.top.app import TopApp
from keylane.cli.top.asker import Asker
from support.cluster import Cluster
from support.server_process import run_keylane
from support.terminal import at_terminal

LIMIT_S = 60


@asynccontextmanager
async def shown(cluster: Cluster) -> AsyncIterator[Pilot[None]]:
    """The screen, in this process."""
    async with Asker.opened(cluster.meta) as asker:
        async with TopApp(asker).run_test(size=(100, 30)) as pilot:
            yield pilot


async def seen(pilot: Pilot[None], is_there: Callable[[str], object]) -> str:
    """Wait until the screen shows something, and return its text."""
    until = time.monotonic() + LIMIT_S
    while True:
        await pilot.pause(0.05)
        strips = pilot.app.screen._compositor.render_strips()
        text = "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)
        if is_there(text):
            return text
        assert time.monotonic() < until, text


@asynccontextmanager
async def traffic(cluster: Cluster) -> AsyncIterator[None]:
    """20 messages a second for orders, in the block."""

    async def send() -> None:
        async with Producer(cluster.meta) as producer:
            number = 0
            while True:
                producer.send("orders", b"value", key=f"k{number % 7}")
                number += 1
                await asyncio.sleep(0.05)

    sending = asyncio.create_task(send())
    try:
        yield
    finally:
        sending.cancel()
        await asyncio.wait([sending])


async def test_screen_shows_rates_and_why_a_group_lags_and_outlives_the_metaserver(
    cluster: Cluster,
):
    await cluster.create("orders")
    async with Admin(cluster.meta) as admin:
        await admin.create_group("orders", "billing", start="earliest")
    async with traffic(cluster), shown(cluster) as pilot:
        await seen(pilot, lambda text: re.search(r"orders +[0-9.]+ +[0-9.]+ k?B", text))
        await seen(pilot, lambda text: "! billing on orders: No consumer has joined" in text)
        await pilot.press("enter")
        text = await seen(pilot, lambda text: "! No consumer has joined" in text)
        assert text.count("  open  ") == 4
        await pilot.press("escape")
        cluster.meta_program.kill()
        await seen(pilot, lambda text: "STALE since" in text)
        before = await seen(pilot, lambda text: "! No figures from the metaserver" in text)
        lag = lag_of(before)
        await seen(pilot, lambda text: lag_of(text) > lag + 20)
        cluster.meta_program.restart()
        text = await seen(pilot, lambda text: "STALE" not in text)
        assert "no figures" not in text


def lag_of(text: str) -> int:
    row = re.search(r"^ billing +orders +([0-9,]+)", text, re.MULTILINE)
    return int(row.group(1).replace(",", "")) if row else 0


async def test_broker_that_dies_keeps_its_figures_and_comes_back(cluster: Cluster):
    await cluster.create("orders")
    async with shown(cluster) as pilot:
        await seen(pilot, lambda text: text.count("available") == 2 and "%" in text)
        cluster.brokers[0].kill()
        text = await seen(pilot, lambda text: "Broker group g1" in text)
        assert re.search(r"^ g1 .*%", text, re.MULTILINE)
        cluster.brokers[0].restart()
        await seen(pilot, lambda text: text.count("available") == 2 and "broker group" not in text)


async def test_screen_waits_for_a_metaserver_that_is_not_there_yet(cluster: Cluster):
    cluster.meta_program.kill()
    async with shown(cluster) as pilot:
        await seen(pilot, lambda text: "! No figures from the metaserver" in text)
        cluster.meta_program.restart()
        await seen(pilot, lambda text: text.count("available") == 2)


def test_command_restores_the_terminal_when_it_is_terminated(shared_cluster: Cluster):
    with at_terminal("top", "--meta", shared_cluster.meta) as terminal:
        terminal.wait_for("Brokers (2)")
        terminal._process.terminate()
        assert terminal.end() == 143
    assert "\x1b[?1049l" in terminal.shown


def test_command_draws_on_a_terminal_until_q(shared_cluster: Cluster):
    with at_terminal("top", "--meta", shared_cluster.meta) as terminal:
        terminal.wait_for("Brokers (2)")
        terminal.press("q")
        assert terminal.end() == 0
    assert "\x1b[?1049l" in terminal.shown, "the screen before it is back"


@pytest.mark.parametrize("output", [[], ["--meta", "127.0.0.1:1"]])
def test_command_without_a_terminal_names_the_lists(output):
    done = run_keylane("top", *output)
    assert done.returncode == 1
    assert "keylane top draws on a terminal, and this is none" in done.stderr
    assert "keylane group list SUBJECT --output json" in done.stderr
    assert done.stdout == ""
