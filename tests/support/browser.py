"""A real browser for tests of pages: Debian's Chromium, driven by Playwright; and axe."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from keylane import Admin, Consumer, Message, Producer

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NEEDED = "KEYLANE_NEEDS_BROWSER"
"""Set where tests with a browser must run."""
PICTURES = Path(__file__).parents[2] / "build" / "console"
"""Where the tests put what they saw."""
HOSTILE = '<img src=x onerror="window.hit=1">\'"&\u202eevil\u202c\x1b[31m\x00\u2028end'
"""Markup, quotes, right-to-left and control characters."""


def find_browser() -> str | None:
    """The path of the machine's browser; None if it has none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def is_needed() -> bool:
    """Whether tests with a browser may not be left out."""
    return bool(os.environ.get(NEEDED))


@asynccontextmanager
async def running_browser() -> AsyncIterator[Any]:
    """A browser without a window."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox"]
        )
        try:
            yield browser
        finally:
            await browser.close()


class WatchedPage:
    """A page of the browser, and what went wrong on it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.address = address
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._hear)
        page.on("requestfailed", self._hear_failure)
        page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))

    def _hear(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def _hear_failure(self, request: Any) -> None:
        if not request.url.startswith(f"http://{self.address}"):
            self.errors.append(f"asked a foreign host: {request.url}")

    async def open(self, path: str = "", *, live: bool = False) -> Any:
        """Open a page of the console; with `live`, wait for its first renewal."""
        answer = await self.page.goto(f"http://{self.address}/console{path}")
        if live:
            await self.page.wait_for_selector("#state[data-state=live]")
        return answer

    async def text(self, selector: str = "#main") -> str:
        """The visible text of a part of the page."""
        return str(await self.page.inner_text(selector))

    async def see(self, text: str, selector: str = "#main") -> None:
        """Wait until a text is on the page."""
        await self.page.locator(selector, has_text=text).first.wait_for()

    async def width(self) -> tuple[int, int]:
        """How wide the page is, and how wide the window is."""
        found = await self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        return found[0], found[1]

    async def picture(self, name: str, *, whole: bool = True) -> None:
        """Keep what is seen: of the whole page, or of what the window shows."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        await self.page.screenshot(path=PICTURES / f"{name}.png", full_page=whole)

    async def axe(self) -> list[str]:
        """What axe finds wrong with the page, a line each."""
        import axe_playwright_python

        script = Path(axe_playwright_python.__file__).parent / "axe.min.js"
        # Not by an element, which the pages' policy would refuse.
        await self.page.evaluate(f"{script.read_text()}\n;0")
        found = await self.page.evaluate(
            "axe.run(document, {resultTypes: ['violations']}).then(r => r.violations.map("
            "v => [v.id, v.help, v.nodes.slice(0, 3).map(n => n.html.slice(0, 200))]))"
        )
        return [f"{rule}: {help_text}: {nodes}" for rule, help_text, nodes in found]


@asynccontextmanager
async def watched_page(browser: Any, address: str, **options: Any) -> AsyncIterator[WatchedPage]:
    """A new page of a browser that remembers nothing. At its end nothing may have gone wrong."""
    options.setdefault("viewport", {"width": 1280, "height": 860})
    context = await browser.new_context(**options)
    context.set_default_timeout(12_000)
    watched = WatchedPage(await context.new_page(), address)
    try:
        yield watched
        assert not watched.errors
        assert await watched.page.evaluate("window.hit === undefined"), "a script of a user ran"
    finally:
        await context.close()


async def until(condition: Callable[[], Awaitable[bool]], *, seconds: float = 30.0) -> None:
    """Wait until `condition` is true."""
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)


class BadError(Exception):
    """What a handler fails with."""


async def fill(
    meta: str, subject: str, *, text: str = "no price for item 7", **access: Any
) -> None:
    """A subject with messages, a group that is behind, and one that has parked keys; no consumer
    runs when this returns.
    """

    async def handle(message: Message) -> None:
        if message.key in {b"customer-3", b"customer-5"}:
            raise BadError(text)

    async with Admin(meta, wait_s=30, **access) as admin:
        async with asyncio.timeout(60):
            while sum(b.available for b in (await admin.list_brokers()).brokers) < 2:
                await asyncio.sleep(0.05)
        await admin.create_subject(subject, partitions=4)
        await admin.create_group(subject, "reports")
        await admin.create_group(subject, "mails")
        async with Producer(meta, **access) as producer:
            for number in range(200):
                await producer.send(
                    subject,
                    b'{"order": %d, "lines": [{"item": 7}]}' % number,
                    key=f"customer-{number % 20}",
                )
        mails = Consumer(
            meta,
            subject=subject,
            group="mails",
            handler=handle,
            on_failure="park",
            tries_max=2,
            **access,
        )
        running = asyncio.create_task(mails.run())
        async with asyncio.timeout(60):
            while sum([each.messages async for each in admin.parked(subject, "mails")], 0) < 20:
                await asyncio.sleep(0.1)
            while await admin.lag(subject, "mails"):
                await asyncio.sleep(0.1)
        await mails.close()
        await asyncio.wait([running])
