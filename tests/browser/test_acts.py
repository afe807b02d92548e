"""Acts from the console: each does what its command does, and destroys nothing by accident."""

import shlex

import pytest
import pytest_asyncio

from keylane import Admin, Consumer
from keylane.errors import SubjectUnknownError
from support.browser import fill, until, watched_page

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def filled(file_cluster):
    await fill(file_cluster.meta, "orders")
    return file_cluster


async def test_resize_shows_its_plan_and_its_command_and_runs(browser, filled):
    async with watched_page(browser, filled.meta) as seen, Admin(filled.meta) as admin:
        await seen.open("/subjects/orders", live=True)
        await seen.page.click("text=Resize")
        await seen.page.fill("[name=partitions]", "7")
        await seen.see("keylane subject resize orders --partitions 7", "#command")
        await seen.page.click("button[value=plan]")
        await seen.see("would open", ".plan")
        assert len(await admin.list_operations("orders")) == 0
        await seen.picture("resize-plan")
        await seen.page.click("button[value=do]")
        await seen.see("Operation 1 has begun")
        (operation,) = await admin.list_operations("orders")
        assert (await admin.wait(operation)).state.value == "done"
        await seen.page.click("text=Look at it")
        await seen.see("7", "dl.facts")


async def test_form_says_what_is_wrong_and_keeps_what_was_typed(browser, filled):
    async with watched_page(browser, filled.meta) as seen:
        await seen.open("/act/resize?subject=orders")
        await seen.page.fill("[name=partitions]", "5000")
        await seen.page.click("button[value=do]")
        await seen.see("Nothing was done", "[role=alert]")
        assert await seen.page.input_value("[name=partitions]") == "5000"
        assert await seen.axe() == []


async def test_subject_is_deleted_only_after_its_name_was_typed(browser, filled):
    async with watched_page(browser, filled.meta) as seen, Admin(filled.meta) as admin:
        await admin.create_subject("doomed")
        await seen.open("/act/subject-delete?subject=doomed")
        await seen.page.fill("#typed", "domed")
        await seen.page.click("button[value=do]")
        await seen.see("type doomed to confirm", "[role=alert]")
        assert "doomed" in {each.subject for each in await admin.list_subjects()}
        await seen.page.fill("#typed", "doomed")
        await seen.page.click("button[value=do]")
        await seen.see("deleted")
        with pytest.raises(SubjectUnknownError):
            await admin.describe_subject("doomed")


async def test_group_is_suspended_and_resumed(browser, filled):
    async with watched_page(browser, filled.meta) as seen, Admin(filled.meta) as admin:
        await seen.open("/subjects/orders/groups/reports", live=True)
        await seen.page.click("text=Suspend")
        await seen.page.click("button[value=do]")
        await seen.see("release their partitions")
        assert (await admin.group_settings("orders", "reports")).suspended
        await seen.open("/subjects/orders/groups/reports", live=True)
        await seen.see("suspended", "dl.facts")
        await seen.page.click("text=Resume")
        await seen.page.click("button[value=do]")
        await seen.see("get partitions again")
        assert not (await admin.group_settings("orders", "reports")).suspended


async def test_reset_shows_the_cursors_first(browser, filled):
    async with watched_page(browser, filled.meta) as seen, Admin(filled.meta) as admin:
        await seen.open("/act/group-reset?subject=orders&group=reports")
        await seen.page.fill("[name=to]", "latest")
        await seen.page.click("button[value=plan]")
        await seen.see("200 are skipped", ".plan")
        assert await admin.lag("orders", "reports") == 200
        await seen.page.fill("#typed", "reports")
        await seen.page.click("button[value=do]")
        await seen.see("The cursors are set")
        assert await admin.lag("orders", "reports") == 0


async def test_parked_key_is_edited_redriven_and_skipped(browser, filled):
    got: list[bytes] = []

    async def handle(message) -> None:
        got.append(message.value)

    async with watched_page(browser, filled.meta) as seen, Admin(filled.meta) as admin:
        await seen.open("/subjects/orders/groups/mails/parked")
        await seen.page.click("text=customer-3")
        await seen.page.locator("a", has_text="Edit").first.click()
        assert '"order": 3' in await seen.page.input_value("textarea")
        await seen.page.fill("textarea", "repaired")
        await seen.page.click("button[value=do]")
        await seen.see("The message is edited")
        await seen.open(f"/act/redrive?subject=orders&group=mails&key_hex={b'customer-3'.hex()}")
        await seen.page.click("button[value=do]")
        await seen.see("will be handled again")
        await seen.open(f"/act/skip?subject=orders&group=mails&key_hex={b'customer-5'.hex()}")
        await seen.see("customer-5", ".fixed")
        await seen.see(f"hex {b'customer-5'.hex()}", ".fixed")
        await seen.page.check("[name=all_messages]")
        await seen.page.fill("#typed", "mails")
        await seen.page.click("button[value=do]")
        await seen.see("type customer-5 to confirm", "[role=alert]")
        assert await seen.axe() == []
        await seen.picture("skip-key")
        await seen.page.fill("#typed", "customer-5")
        await seen.page.click("button[value=do]")
        await seen.see("10 messages skipped")
        consumer = Consumer(filled.meta, subject="orders", group="mails", handler=handle)
        async with consumer:

            async def is_empty() -> bool:
                return [each async for each in admin.parked("orders", "mails")] == []

            await until(is_empty)
        assert got[0] == b"repaired"


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
async def test_question_for_a_key_is_answered_as_the_command_answers(browser, filled, look):
    options = {"color_scheme": "dark" if look == "dark" else "light"}
    if look == "phone":
        options["viewport"] = {"width": 390, "height": 844}
    async with watched_page(browser, filled.meta, **options) as seen, Admin(filled.meta) as admin:
        await seen.open("/subjects/orders/groups/mails", live=True)
        assert await seen.axe() == []
        await seen.page.fill("#field-key", "customer-7")
        await seen.see("keylane why orders --group mails --key customer-7", "#command")
        await seen.picture(f"question-{look}")
        await seen.page.click("button[value=do]")
        explained = await admin.why("orders", "mails", key="customer-7")
        await seen.see("mails on orders, key customer-7", ".answer")
        await seen.see(explained.causes[0].step, ".answer")
        text = await seen.text(".answer")
        said = explained.causes[0].text[1:].partition(" left ")[0]
        assert said.partition(" stored ")[0] in text  # its age is another one
        assert await seen.axe() == []
        page, window = await seen.width()
        assert page <= window
        await seen.picture(f"answer-{look}")
        await seen.page.fill("#field-key", "00zz")
        await seen.page.check("[name=hex]")
        await seen.page.click("button[value=do]")
        await seen.see("not hexadecimal", "[role=alert]")
        await seen.page.fill("#field-key", b"customer-3".hex())
        await seen.see(f"--key-hex {b'customer-3'.hex()}", "#command")
        await seen.page.click("button[value=do]")
        await seen.see("key customer-3", ".answer h2")


async def test_question_on_the_page_of_a_subject_names_the_group(browser, filled):
    async with watched_page(browser, filled.meta) as seen:
        await seen.open("/subjects/orders", live=True)
        choices = await seen.page.locator("#field-group-choices option").evaluate_all(
            "found => found.map(each => each.value)"
        )
        assert {"mails", "reports"} <= set(choices)
        await seen.page.fill("#field-group", "reports")
        await seen.page.fill("#field-key", "customer-1")
        await seen.see("--group reports --key customer-1", "#command")
        await seen.page.click("button[value=do]")
        await seen.see("reports on orders, key customer-1", ".answer")
        await seen.page.click("text=Back")
        await seen.see("Progress by partition")


async def test_question_that_is_typed_outlives_a_redrawn_page(browser, filled):
    async with watched_page(browser, filled.meta) as seen, Admin(filled.meta) as admin:
        await seen.open("/subjects/orders", live=True)
        await seen.page.locator("#field-key").press_sequentially("cust")
        await admin.create_group("orders", "appears")
        await seen.see("appears", "table")
        await seen.page.keyboard.type("omer-9")
        assert await seen.page.input_value("#field-key") == "customer-9"
        await admin.delete_group("orders", "appears")


async def test_broker_is_cordoned_and_evacuated_with_the_plan_first(browser, filled):
    async with watched_page(browser, filled.meta) as seen, Admin(filled.meta) as admin:
        await admin.create_subject("spread", partitions=2)
        await seen.open("/act/evacuate?broker=g2")
        await seen.page.click("button[value=plan]")
        await seen.see("on g1, continuing", ".plan")
        await seen.page.fill("#typed", "g2")
        await seen.page.click("button[value=do]")
        await seen.see("stays cordoned")

        async def is_empty() -> bool:
            described = await admin.describe_subject("spread")
            return all(
                each.broker_group == "g1" for each in described.partitions if each.state == "open"
            )

        await until(is_empty)
        await seen.open("/brokers/g2", live=True)
        await seen.page.click("text=Uncordon")
        await seen.page.click("button[value=do]")
        await seen.see("may get partitions again")


async def test_form_of_another_page_does_nothing(browser, filled):
    async with watched_page(browser, filled.meta) as seen, Admin(filled.meta) as admin:
        await seen.open("/act/cordon?broker=g1")
        await seen.page.evaluate("document.querySelector('[name=csrf]').value = 'x'")
        await seen.page.click("button[value=do]")
        await seen.see("Nothing was done", "[role=alert]")
        brokers = (await admin.list_brokers()).brokers
        assert not any(each.cordoned for each in brokers if each.broker_group == "g1")


async def test_command_beside_the_button_is_one_of_the_command_line(browser, filled):
    """Typed in a shell, it creates the group."""
    from click.testing import CliRunner

    from keylane.cli.main import app

    async with watched_page(browser, filled.meta) as seen:
        await seen.open("/act/group-create?subject=orders")
        await seen.page.fill("[name=group]", "typed")
        await seen.page.fill("[name=start]", "-1h")
        await seen.see("typed", "#command")
        await seen.see("-1h", "#command")
        words = shlex.split(await seen.text("#command"))
    assert words[0] == "keylane"
    import asyncio

    result = await asyncio.to_thread(
        CliRunner().invoke, app, [*words[1:], "--meta", filled.meta], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    async with Admin(filled.meta) as admin:
        assert "typed" in {each.group for each in await admin.list_groups("orders")}
