"""Every page of the console in a real browser: what it says, whether everyone can use it, and how it
looks.
"""

from urllib.parse import quote

import pytest
import pytest_asyncio

from keylane.console.views.messages import SHOWN_MAX
from support.browser import fill, watched_page

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

PAGES = {
    "overview": ("", ["What is wrong now", "Lag by consumer group", "Rates by subject"]),
    "subjects": ("/subjects", ["orders"]),
    "subject": ("/subjects/orders", ["Consumer groups", "mails", "reports", "Partitions"]),
    "lineage": ("/subjects/orders/lineage", ["Every partition", "logical partitions"]),
    "messages": (
        "/subjects/orders/messages",
        ["The newest messages", "customer-", "bytes, as JSON"],
    ),
    "partition": ("/subjects/orders/partitions/1", ["Progress of consumer groups", "mails"]),
    "group": ("/subjects/orders/groups/mails", ["keys have been parked", "Progress by partition"]),
    "parked": ("/subjects/orders/groups/mails/parked", ["customer-3", "BadError", "redrive"]),
    "parked-messages": (
        f"/subjects/orders/groups/mails/parked/messages?key_hex={b'customer-3'.hex()}",
        ["customer-3", "no price for item 7", "Edit"],
    ),
    "consumers": ("/consumers", ["No consumer is alive", "keylane consume"]),
    "consumer": (
        "/consumer?subject=orders&group=mails&client=gone",
        ["gone", "It has left", "It has no partition"],
    ),
    "brokers": ("/brokers", ["g1", "g2", "available"]),
    "broker": ("/brokers/g1", ["Partitions that it hosts", "orders"]),
    "resize": ("/act/resize?subject=orders&partitions=6", ["keylane subject resize orders"]),
    "evacuate": ("/act/evacuate?broker=g1", ["Type g1 to confirm"]),
    "reset": ("/act/group-reset?subject=orders&group=mails", ["Type mails to confirm"]),
    "create": ("/act/subject-create", ["keylane subject create"]),
}
NOT_LIVE = {"messages", "parked", "parked-messages", "resize", "evacuate", "reset", "create"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def filled(file_cluster):
    await fill(file_cluster.meta, "orders")
    return file_cluster


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
async def test_page_shows_what_it_is_about_to_everyone(browser, filled, name, scheme):
    path, texts = PAGES[name]
    async with watched_page(browser, filled.meta, color_scheme=scheme) as seen:
        await seen.open(path, live=name not in NOT_LIVE)
        for text in texts:
            await seen.see(text)
        await seen.picture(f"{name}-{scheme}")
        assert await seen.axe() == []


@pytest.mark.parametrize("name", PAGES)
async def test_page_fits_a_phone_without_scrolling_sideways(browser, filled, name):
    path, texts = PAGES[name]
    phone = {"width": 375, "height": 812}
    async with watched_page(browser, filled.meta, viewport=phone, has_touch=True) as seen:
        await seen.open(path, live=name not in NOT_LIVE)
        await seen.see(texts[0])
        page, window = await seen.width()
        assert page <= window
        await seen.picture(f"{name}-phone")


@pytest.mark.parametrize("name", ["overview", "subject", "group", "messages"])
async def test_page_is_usable_at_80_percent(browser, filled, name):
    path, texts = PAGES[name]
    wide = {"width": 1600, "height": 1000}  # 1280 pixels, at 80 %
    async with watched_page(browser, filled.meta, viewport=wide, device_scale_factor=0.8) as seen:
        await seen.open(path, live=name not in NOT_LIVE)
        await seen.see(texts[0])
        page, window = await seen.width()
        assert page <= window
        await seen.picture(f"{name}-80")


async def test_page_is_reached_by_keyboard_alone(browser, filled):
    async with watched_page(browser, filled.meta) as seen:
        await seen.open("", live=True)
        await seen.page.keyboard.press("Tab")
        assert await seen.page.evaluate("document.activeElement.textContent") == (
            "Skip to the content"
        )
        for _ in range(3):
            await seen.page.keyboard.press("Tab")
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert await seen.page.evaluate("document.activeElement.textContent") == "Subjects"
        assert await seen.page.evaluate(outline) == "solid"
        await seen.page.keyboard.press("Enter")
        await seen.see("orders")
        assert seen.page.url.endswith("/console/subjects")


async def test_page_keeps_the_focus_when_it_is_drawn_anew(browser, filled):
    from keylane import Admin

    async with watched_page(browser, filled.meta) as seen:
        await seen.open("/subjects", live=True)
        await seen.page.focus("a[href='/console/subjects/orders']")
        async with Admin(filled.meta) as admin:
            await admin.create_subject("another")
        await seen.see("another")
        focused = await seen.page.evaluate("document.activeElement.getAttribute('href')")
        assert focused == "/console/subjects/orders"


async def test_messages_are_found_by_key_offset_and_time_and_shown_in_each_form(browser, filled):
    async with watched_page(browser, filled.meta) as seen:
        await seen.open("/subjects/orders/messages?start=earliest&key=customer-4")
        assert await seen.page.locator("ol.messages > li").count() == 10
        await seen.page.locator("summary").first.click()
        assert '"order": 4' in await seen.text("details[open] pre")
        await seen.open("/subjects/orders/messages?start=earliest&key=customer-4&form=hex")
        await seen.page.locator("summary").first.click()
        assert "7b 22 6f 72 64 65 72" in await seen.text("details[open] pre")
        key_hex = b"customer-4".hex()
        await seen.open(f"/subjects/orders/messages?start=earliest&key={key_hex}&key_as=hex")
        assert await seen.page.locator("ol.messages > li").count() == 10
        follow = await seen.page.get_attribute("a:has-text('Follow')", "href")
        assert f"key={key_hex}&key_as=hex" in follow
        await seen.open("/subjects/orders/messages?key=customer-4&key_as=hex")
        await seen.see("the key is not hexadecimal")
        await seen.open("/subjects/orders/messages?start=2&partition=1")
        assert "partition 1, offset 2" in await seen.text("ol.messages > li:first-child")
        await seen.open("/subjects/orders/messages?start=-1h")
        assert await seen.page.locator("ol.messages > li").count() == 50
        first = await seen.text("ol.messages > li:first-child")
        await seen.page.click("text=Next")
        assert await seen.text("ol.messages > li:first-child") != first
        await seen.open(f"/subjects/orders/messages?start={quote('2020-01-01T00:00:00Z')}")
        assert await seen.page.locator("ol.messages > li").count() == 50
        await seen.open("/subjects/orders/messages?start=nonsense")
        await seen.see("begin at newest, earliest")


async def test_newest_messages_are_those_of_all_partitions_however_many(browser, filled):
    from keylane import Admin, Producer

    newest: dict[int, str] = {}
    async with Admin(filled.meta) as admin, Producer(filled.meta) as producer:
        await admin.create_subject("wide", partitions=60)
        for number in range(150):
            sent = await producer.send("wide", b"x", key=f"k{number}")
            newest.pop(sent.partition_id, None)
            newest[sent.partition_id] = f"partition {sent.partition_id}, offset {sent.offset}"
    async with watched_page(browser, filled.meta) as seen:
        await seen.open("/subjects/wide/messages")
        shown = await seen.page.locator("ol.messages > li").all_text_contents()
    expected = list(newest.values())[: -SHOWN_MAX - 1 : -1]
    assert len(shown) == len(expected) == SHOWN_MAX
    assert all(place in text for text, place in zip(shown, expected, strict=True))


async def test_tail_shows_messages_as_they_come(browser, filled):
    from keylane import Producer

    async with watched_page(browser, filled.meta) as seen:
        await seen.open("/subjects/orders/messages?follow=on")
        await seen.see("waiting for messages")
        async with Producer(filled.meta) as producer:
            await producer.send("orders", b"brand new", key="tail")
        await seen.see("brand new", "ol[data-tail]")
        await seen.page.click("#tail-toggle")
        await seen.see("paused")


async def test_answers_forbid_what_pages_do_not_need(browser, filled):
    async with watched_page(browser, filled.meta) as seen:
        headers = (await seen.open("")).headers
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"
