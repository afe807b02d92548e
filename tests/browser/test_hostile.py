"""Keys, values, properties, errors and names full of markup and control characters, on every page."""

from urllib.parse import quote

import pytest
import pytest_asyncio

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from support.browser import HOSTILE, until, watched_page

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
LONG = "a" + "long-name." * 19 + "end"
KEY = HOSTILE.encode()


class EvilError(Exception):
    """Its text is markup."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hostile(file_cluster):
    """A consumer and a producer that mean no good; the consumer runs on."""

    async def handle(_message: Message) -> None:
        raise EvilError(HOSTILE)

    meta = file_cluster.meta
    async with Admin(meta, wait_s=30) as admin:
        await file_cluster.create(LONG, partitions=2)
        await admin.create_group(LONG, LONG)
        async with Producer(meta) as producer:
            for value in (
                KEY,
                b"\xff\xfe\x00",
                b"<script>window.hit = 1</script>",
                b'{"a": "<b>"}',
            ):
                await producer.send(LONG, value, key=KEY, properties={"<i>": HOSTILE})
            await producer.send(LONG, b"</pre><script>window.hit = 1</script>")
        consumer = Consumer(
            meta,
            subject=LONG,
            group=LONG,
            handler=handle,
            on_failure="park",
            tries_max=1,
            settings=ConsumerSettings(name=HOSTILE.replace("\x00", "")),
        )
        async with consumer:

            async def is_parked() -> bool:
                return len([each async for each in admin.parked(LONG, LONG)]) >= 2

            await until(is_parked)
            yield file_cluster


def pages() -> list[str]:
    group = f"/subjects/{LONG}/groups/{LONG}"
    client = quote(HOSTILE.replace("\x00", ""), safe="")
    key_hex = KEY.hex()
    return [
        "",
        "/subjects",
        f"/subjects?name={quote(HOSTILE)}",
        f"/subjects/{LONG}",
        f"/subjects/{LONG}/lineage",
        f"/subjects/{LONG}/messages",
        f"/subjects/{LONG}/messages?form=text&key={quote(HOSTILE)}&start={quote(HOSTILE)}",
        f"/subjects/{LONG}/messages?follow=on",
        f"/subjects/{LONG}/partitions/1",
        f"/subjects/{LONG}/partitions/{quote(HOSTILE, safe='')}",
        group,
        f"{group}/parked",
        f"{group}/parked/messages?key_hex={key_hex}",
        "/consumers",
        f"/consumer?subject={LONG}&group={LONG}&client={client}",
        "/brokers",
        f"/brokers/{quote(HOSTILE, safe='')}",
        f"/subjects/{quote(HOSTILE, safe='')}",
        f"/{quote(HOSTILE, safe='')}",
        f"/act/group-suspend?subject={LONG}&group={LONG}&client={client}",
        f"/act/resize?subject={quote(HOSTILE)}&partitions={quote(HOSTILE)}",
        f"/act/redrive?subject={LONG}&group={LONG}&key_hex={key_hex}",
        f"/act/skip?subject={LONG}&group={LONG}&key_hex={key_hex}",
        f"/act/skip?subject={quote(HOSTILE)}&group={quote(HOSTILE)}&no_key=on&error={quote(HOSTILE)}",
        f"/act/skip?subject={LONG}&group={LONG}&key_hex={quote(HOSTILE)}&dead=on",
        f"/act/why?subject={LONG}&group={LONG}&key={quote(HOSTILE)}",
        f"/act/why?subject={quote(HOSTILE)}&group={quote(HOSTILE)}&key={key_hex}&hex=on",
        f"/act/{quote(HOSTILE, safe='')}",
    ]


@pytest.mark.parametrize("width", [1280, 375])
async def test_pages_execute_nothing_of_a_user_and_keep_their_width(browser, hostile, width):
    viewport = {"width": width, "height": 812}
    async with watched_page(browser, hostile.meta, viewport=viewport) as seen:
        for number, path in enumerate(pages()):
            await seen.open(path)
            await seen.page.wait_for_timeout(150)
            assert await seen.page.locator("main img, main script, main b, main i").count() == 0
            page, window = await seen.width()
            assert page <= window, path
            text = await seen.text("body")
            assert not set("\x1b\u202e\u202c\u2028\x00") & set(text), path
            await seen.picture(f"hostile-{number}-{width}")


async def test_answer_about_a_hostile_key_is_text(browser, hostile):
    async with watched_page(browser, hostile.meta, viewport={"width": 390, "height": 844}) as seen:
        await seen.open(f"/subjects/{LONG}/groups/{LONG}", live=True)
        await seen.page.fill("#field-key", KEY.hex())
        await seen.page.check("[name=hex]")
        await seen.page.click("button[value=do]")
        await seen.see("\\u202eevil", ".answer h2")
        await seen.see("EvilError", ".answer")
        assert await seen.page.locator("main img, main script, main b, main i").count() == 0
        assert not set("\x1b\u202e\u202c\u2028\x00") & set(await seen.text("body"))
        page, window = await seen.width()
        assert page <= window
        await seen.picture("hostile-answer")


async def test_key_is_shown_apart_from_the_text_around_it(browser, hostile):
    async with watched_page(browser, hostile.meta) as seen:
        await seen.open(f"/subjects/{LONG}/messages")
        key = seen.page.locator("bdi.key", has_text="<img").first
        assert "\\u202eevil" in await key.inner_text()


async def test_live_cells_are_text(browser, hostile):
    async with watched_page(browser, hostile.meta) as seen:
        await seen.open(f"/subjects/{LONG}/groups/{LONG}", live=True)
        await seen.see("EvilError")
        await seen.page.wait_for_timeout(2_500)
        assert await seen.page.locator("main img, main b").count() == 0
