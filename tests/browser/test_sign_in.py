"""The console of a cluster with access control."""

import secrets
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from keylane.protocol.access.tokens import make_token
from support.access.guarded import GuardedCluster
from support.browser import fill, watched_page

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
FOLLOWED = "/subjects/orders/messages?follow=on"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(tmp_path_factory):
    with GuardedCluster(tmp_path_factory.mktemp("guarded"), 2) as cluster:
        await fill(cluster.meta, "orders", token=cluster.admin_token)
        yield cluster


async def sign_in(seen, token: str, path: str = "") -> None:
    await seen.open(path)
    await seen.see("Access token")
    await seen.page.fill("#token", token)
    await seen.page.click("button:has-text('Sign in')")


@asynccontextmanager
async def signed_in_for_a_while(guarded, seen, path: str, *rights: str):
    """Sign in at a page with a token of these rights, which is revoked at the end."""
    principal = f"operator-{secrets.token_hex(4)}"
    async with guarded.admin() as admin:
        made = await admin.create_token(principal)
        for right in rights:
            await admin.grant(principal, right)
        await sign_in(seen, made.token, path)
        yield
        await admin.revoke_token(made.view.token_id)


def requests_of(seen) -> list[str]:
    """The addresses that a page asks for from now on."""
    asked: list[str] = []
    seen.page.on("request", lambda request: asked.append(request.url))
    return asked


async def test_pages_show_nothing_without_a_token(browser, guarded):
    async with watched_page(browser, guarded.meta) as seen:
        for path in ("", "/subjects/orders", "/act/cordon?broker=g1", "/live?page=/console"):
            answer = await seen.open(path)
            assert answer.status == 401
            assert "mails" not in await seen.page.content()
        await seen.open("")
        await seen.picture("sign-in-light")
        assert await seen.axe() == []
        await seen.page.fill("#token", make_token(secrets.randbits))
        await seen.page.click("button:has-text('Sign in')")
        await seen.see("token", "[role=alert]")
        await seen.page.fill("#token", "nonsense")
        await seen.page.click("button:has-text('Sign in')")
        await seen.see("has no token", "[role=alert]")


async def test_person_signs_in_comes_to_the_page_and_signs_out(browser, guarded):
    async with watched_page(browser, guarded.meta) as seen:
        await sign_in(seen, guarded.admin_token, "/subjects/orders/groups/mails")
        await seen.see("Progress by partition")
        await seen.page.wait_for_selector("#state[data-state=live]")
        (cookie,) = await seen.page.context.cookies()
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        assert cookie["path"] == "/console"
        assert await seen.page.evaluate("document.cookie") == ""
        assert guarded.admin_token not in await seen.page.content()
        await seen.page.click("text=Sign out")
        await seen.see("Access token")
        assert (await seen.open("/subjects")).status == 401


async def test_tokens_rights_quotas_and_audit_are_shown_and_changed(browser, guarded):
    async with watched_page(browser, guarded.meta) as seen:
        await sign_in(seen, guarded.admin_token, "/act/token-create")
        await seen.page.fill("[name=principal]", "shop")
        await seen.page.fill("[name=label]", "<b>the</b> shop's service")
        await seen.page.click("button[value=do]")
        await seen.see("It is never shown again")
        assert (await seen.text("pre")).startswith("kl_")
        await seen.open("/act/grant")
        await seen.page.fill("[name=principal]", "shop")
        await seen.page.fill("[name=subject]", "orders*")
        await seen.page.click("button[value=do]")
        await seen.see("shop has the right")
        await seen.open("/act/quota-set")
        await seen.page.fill("[name=name]", "shop")
        await seen.page.fill("[name=bytes_per_s]", "1000000")
        await seen.page.click("button[value=do]")
        await seen.see("limits of shop are set")
        for path, text in (
            ("/access", "<b>the</b> shop's service"),
            ("/access/rights", "orders*"),
            ("/access/quotas", "1\N{NARROW NO-BREAK SPACE}000\N{NARROW NO-BREAK SPACE}000"),
            ("/access/audit?who=admin", "/v1/access/tokens"),
        ):
            await seen.open(path)
            await seen.see(text)
            await seen.picture(path.strip("/").partition("?")[0].replace("/", "-"))
            assert await seen.axe() == []


async def test_act_is_in_the_audit_log_under_the_one_who_signed_in(browser, guarded):
    token = await guarded.principal("operator", "administer", "read")
    async with watched_page(browser, guarded.meta) as seen:
        await sign_in(seen, token, "/act/cordon?broker=g1")
        await seen.page.click("button[value=do]")
        await seen.see("gets no new partitions")
    async with guarded.admin() as admin:
        await admin.uncordon("g1")
        rows = (await admin.list_audit(who="operator")).rows
    assert [row.event.did for row in rows if "cordon" in row.event.did]


async def test_token_may_do_no_more_than_its_rights(browser, guarded):
    token = await guarded.principal("reader", "read", subject="orders")
    async with watched_page(browser, guarded.meta) as seen:
        await sign_in(seen, token, "/subjects/orders")
        await seen.see("Consumer groups")
        await seen.open("")
        await seen.see("has no right")
        await seen.open("/act/resize?subject=orders&partitions=9")
        await seen.page.click("button[value=do]")
        await seen.see("Nothing was done", "[role=alert]")


async def test_sign_in_that_ends_in_the_middle_of_an_act_keeps_the_form(browser, guarded):
    path = "/act/resize?subject=orders"
    async with watched_page(browser, guarded.meta) as seen, guarded.admin() as admin:
        async with signed_in_for_a_while(guarded, seen, path, "administer", "read"):
            await seen.page.fill("[name=partitions]", "9")
        await seen.page.wait_for_timeout(1_500)  # metaservers keep a token for a second
        await seen.page.click("button[value=do]")
        await seen.see("Nothing was done", "[role=alert]")
        assert await admin.list_operations("orders") == []
        await seen.page.fill("#token", guarded.admin_token)
        await seen.page.click("button:has-text('Sign in')")
        await seen.see("keylane subject resize orders --partitions 9")
        assert await seen.page.input_value("[name=partitions]") == "9"
        await seen.page.click("button[value=plan]")
        await seen.see("would open", ".plan")


async def test_open_page_says_that_its_sign_in_has_ended(browser, guarded):
    async with watched_page(browser, guarded.meta) as seen:
        async with signed_in_for_a_while(guarded, seen, "/subjects/orders", "read"):
            await seen.page.wait_for_selector("#state[data-state=live]")
        await seen.see("Your sign-in has ended", "#stale")


async def test_sign_out_of_an_ended_sign_in_leads_to_the_form_to_sign_in(browser, guarded):
    async with watched_page(browser, guarded.meta) as seen:
        await sign_in(seen, guarded.admin_token, "/subjects/orders")
        await seen.see("Consumer groups")
        await seen.page.context.clear_cookies()
        await seen.page.click("text=Sign out")
        await seen.see("Access token")


async def test_tail_ends_with_its_sign_in_and_asks_no_more(browser, guarded):
    async with watched_page(browser, guarded.meta) as seen:
        async with signed_in_for_a_while(guarded, seen, FOLLOWED, "read"):
            await seen.see("waiting for messages", "#tail-state")
            asked = requests_of(seen)
        await seen.see("Your sign-in has ended", "#tail-state")
        await seen.page.wait_for_timeout(5_000)
        assert asked == []
        await seen.picture("tail-signed-out")
        await seen.page.click("text=Sign in again")
        await seen.see("Access token")
        await seen.page.fill("#token", guarded.admin_token)
        await seen.page.click("button:has-text('Sign in')")
        await seen.see("waiting for messages", "#tail-state")


async def test_tail_that_is_refused_says_that_the_sign_in_has_ended(browser, guarded):
    async with watched_page(browser, guarded.meta) as seen:
        await sign_in(seen, guarded.admin_token, FOLLOWED)
        await seen.see("waiting for messages", "#tail-state")
        await seen.page.click("#tail-toggle")
        await seen.page.context.clear_cookies()
        await seen.page.click("#tail-toggle")
        await seen.see("Your sign-in has ended", "#tail-state")
        asked = requests_of(seen)
        await seen.page.wait_for_timeout(5_000)
        assert asked == []


async def test_host_that_is_not_the_servers_is_refused(guarded):
    """A page of another site whose name leads here would have the origin of the console."""
    import aiohttp

    async with aiohttp.ClientSession() as session:
        url = f"http://{guarded.meta}/console"
        async with session.get(url, headers={"Host": "evil.example"}) as answer:
            assert answer.status == 421
        async with session.get(url, headers={"Sec-Fetch-Site": "cross-site"}) as answer:
            assert answer.status == 403
        headers = {"Origin": "http://evil.example"}
        async with session.post(f"{url}/act/cordon", headers=headers) as answer:
            assert answer.status == 403
