"""A page that is open while the cluster changes, hangs and dies."""

import pytest

from keylane import Admin, Producer
from support.browser import fill, until, watched_page
from support.cluster import Cluster, pause, resume

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def own_cluster(tmp_path):
    with Cluster(tmp_path, meta_settings="broker_ttl_ms = 6000\n") as cluster:
        yield cluster


async def test_cells_change_without_a_new_page(browser, own_cluster):
    await fill(own_cluster.meta, "orders")
    async with watched_page(browser, own_cluster.meta) as seen:
        await seen.open("/subjects/orders", live=True)
        await seen.page.evaluate("window.mark = 1")
        await seen.see("200", "dl.facts")
        async with Producer(own_cluster.meta) as producer:
            for number in range(50):
                await producer.send("orders", b"more", key=f"k{number}")
        await seen.see("250", "dl.facts")
        async with Admin(own_cluster.meta) as admin:
            await admin.wait(await admin.resize("orders", 6))
        await seen.see("sealed")
        assert await seen.page.evaluate("window.mark") == 1


async def test_lineage_is_drawn_while_a_resize_waits_and_when_it_is_done(browser, own_cluster):
    """A broker that hangs holds the resize up."""
    await fill(own_cluster.meta, "orders")
    async with watched_page(browser, own_cluster.meta) as seen, Admin(own_cluster.meta) as admin:
        await seen.open("/subjects/orders/lineage", live=True)
        await seen.page.evaluate("window.mark = 1")
        await seen.see("4 open partitions, 4 ever", "svg.kl text")
        assert await seen.page.locator("svg.kl .kl-planned").count() == 0
        pause(own_cluster.brokers[1].process.pid)
        operation = await admin.resize("orders", 6)
        await seen.page.locator("svg.kl rect.kl-planned").first.wait_for()
        await seen.picture("lineage-resize")
        resume(own_cluster.brokers[1].process.pid)
        await admin.wait(operation)
        await seen.see("6 open partitions, 10 ever", "svg.kl text")
        assert await seen.page.locator("svg.kl .kl-planned").count() == 0
        assert await seen.page.evaluate("window.mark") == 1


async def test_page_says_since_when_it_is_stale_and_comes_back(browser, own_cluster):
    await fill(own_cluster.meta, "orders")
    async with watched_page(browser, own_cluster.meta) as seen:
        await seen.open("/subjects/orders", live=True)
        own_cluster.meta_program.kill()
        await seen.see("has not answered since", "#stale")
        await seen.see("Trying again", "#stale")
        assert "orders" in await seen.text()
        await seen.picture("metaserver-dead")
        assert await seen.axe() == []
        own_cluster.meta_program.restart()
        await seen.page.wait_for_selector("#state[data-state=live]")
        assert not await seen.page.is_visible("#stale")


async def test_page_says_that_a_metaserver_hangs(browser, own_cluster):
    await fill(own_cluster.meta, "orders")
    async with watched_page(browser, own_cluster.meta) as seen:
        await seen.open("", live=True)
        pause(own_cluster.meta_program.process.pid)
        await seen.see("has not answered since", "#stale")
        resume(own_cluster.meta_program.process.pid)
        await seen.page.wait_for_selector("#state[data-state=live]")


async def test_page_says_what_is_not_known_while_a_broker_hangs(browser, own_cluster):
    await fill(own_cluster.meta, "orders")
    async with watched_page(browser, own_cluster.meta) as seen:
        await seen.open("/subjects/orders/groups/mails", live=True)
        pause(own_cluster.brokers[1].process.pid)
        await seen.see("broker group g2 has not answered within 1.0 s", ".unknown")
        assert "?" in await seen.text("table >> nth=0")
        await seen.open("", live=True)
        await seen.see("broker group g2", ".unknown")
        await seen.picture("broker-hangs")
        await seen.see("broker group g2 has been silent", ".wrong")  # once its ttl is over
        resume(own_cluster.brokers[1].process.pid)

        async def is_fine() -> bool:
            return await seen.page.locator(".unknown").count() == 0

        await until(is_fine)


HIDE = "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
SHOW = "Object.defineProperty(document, 'hidden', {value: false, configurable: true});"
CHANGED = "document.dispatchEvent(new Event('visibilitychange'))"


async def test_hidden_page_asks_nothing(browser, own_cluster):
    await fill(own_cluster.meta, "orders")
    async with watched_page(browser, own_cluster.meta) as seen:
        await seen.open("", live=True)
        await seen.page.evaluate(HIDE + CHANGED)
        before = await seen.page.evaluate("document.documentElement.dataset.renewed")
        await seen.page.wait_for_timeout(2_500)
        assert await seen.page.evaluate("document.documentElement.dataset.renewed") == before
        await seen.page.evaluate(SHOW + CHANGED)

        async def is_renewed() -> bool:
            return await seen.page.evaluate("document.documentElement.dataset.renewed") != before

        await until(is_renewed)


@pytest.mark.parametrize("path", ["", "/subjects/orders/messages?follow=on"])
async def test_page_that_opens_in_a_hidden_tab_asks_nothing(browser, own_cluster, path):
    await fill(own_cluster.meta, "orders")
    async with watched_page(browser, own_cluster.meta) as seen:
        await seen.page.add_init_script(HIDE)
        asked: list[str] = []
        seen.page.on("request", lambda request: asked.append(request.url))
        await seen.open(path)
        await seen.page.wait_for_timeout(2_500)
        assert not [each for each in asked if "/live?" in each or "/tail?" in each]
        await seen.page.evaluate(SHOW + CHANGED)
        if path:
            await seen.page.click("text=Continue")
            await seen.see("waiting for messages", "#tail-state")
        else:
            await seen.page.wait_for_selector("#state[data-state=live]")


async def test_page_that_cannot_be_drawn_anew_tries_again_without_an_error(browser, own_cluster):
    await fill(own_cluster.meta, "orders")
    async with watched_page(browser, own_cluster.meta) as seen, Admin(own_cluster.meta) as admin:
        await seen.open("/subjects", live=True)
        failed: list[str] = []
        seen.page.on("requestfailed", lambda request: failed.append(request.url))
        await seen.page.route("**/console/subjects", lambda route: route.abort())
        await admin.create_subject("another")

        async def has_failed() -> bool:
            return bool(failed)

        await until(has_failed)
        await seen.page.unroute("**/console/subjects")
        await seen.see("another")
