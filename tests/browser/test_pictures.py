"""Takes the pictures of docs/CONSOLE.md, of a cluster at work; `make pictures` keeps them."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest
import pytest_asyncio

from keylane import Admin, Consumer, Message, Producer
from support.browser import PICTURES, fill, watched_page
from support.cluster import Cluster
from tidy.tree import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
NAMES = ("overview", "lineage", "stale", "resize", "phone")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def busy(tmp_path_factory):
    """Orders are sent and billed, reports are slow, and mails fail for two customers."""

    async def bill(_message: Message) -> None:
        await asyncio.sleep(0.001)

    async def report(_message: Message) -> None:
        await asyncio.sleep(0.15)

    with Cluster(tmp_path_factory.mktemp("busy")) as cluster:
        await fill(cluster.meta, "orders")
        async with Admin(cluster.meta) as admin:
            await admin.create_subject("clicks", partitions=2)

        async def send() -> None:
            async with Producer(cluster.meta) as producer:
                for number in range(1_000_000):
                    await producer.send("orders", b'{"order": %d}' % number, key=f"c{number % 50}")
                    if number % 4 == 0:
                        await producer.send("clicks", b"{}", key=f"c{number % 9}")
                    await asyncio.sleep(0.015)

        consumers = [
            Consumer(cluster.meta, subject="orders", group="billing", handler=bill),
            Consumer(cluster.meta, subject="orders", group="reports", handler=report),
        ]
        tasks = [asyncio.create_task(work) for work in (send(), *(c.run() for c in consumers))]
        yield cluster
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_pictures_show_a_cluster_at_work(browser, busy):
    async with watched_page(browser, busy.meta) as seen:
        await seen.open("", live=True)
        await seen.see("keys have been parked")
        await seen.page.wait_for_timeout(15_000)  # the charts need some points
        await seen.picture("overview")
        await seen.open("/act/resize?subject=orders&partitions=6")
        await seen.page.click("button[value=plan]")
        await seen.see("would open", ".plan")
        await seen.picture("resize")
    phone = {"width": 390, "height": 844}
    async with watched_page(browser, busy.meta, viewport=phone, color_scheme="dark") as seen:
        await seen.open("/subjects/orders/groups/reports", live=True)
        await seen.page.wait_for_timeout(3_000)
        await seen.picture("phone", whole=False)
    async with watched_page(browser, busy.meta) as seen, Admin(busy.meta) as admin:
        await admin.wait(await admin.resize("orders", 6))
        await seen.open("/subjects/orders/lineage", live=True)
        await seen.page.wait_for_timeout(10_000)  # both sizes are seen beside each other
        await seen.see("6 open partitions, 10 ever", "svg.kl text")
        await seen.picture("lineage", whole=False)
    small = {"width": 1100, "height": 560}
    async with watched_page(browser, busy.meta, viewport=small) as seen:
        await seen.open("/subjects/clicks", live=True)
        await seen.page.wait_for_timeout(3_000)
        busy.meta_program.kill()
        await seen.see("has not answered since", "#stale")
        await seen.picture("stale", whole=False)
        busy.meta_program.restart()
    if folder := os.environ.get("KEYLANE_PICTURES"):
        (ROOT / folder).mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            shutil.copy(PICTURES / f"{name}.png", Path(ROOT / folder))


async def test_page_has_each_picture():
    text = (ROOT / "docs" / "CONSOLE.md").read_text()
    assert all(f"pictures/console/{name}.png" in text for name in NAMES)
    found = {each.stem for each in (ROOT / "docs" / "pictures" / "console").glob("*.png")}
    assert found == set(NAMES)
