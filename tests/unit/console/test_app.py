"""What the console answers to a browser."""

import re

from keylane.console.app import Console
from keylane.protocol.clock import SystemClock
from keylane.rpc.pages import PageRequest


async def answered(
    method: str, path: str, form: dict[str, str] | None = None, *, is_guarded: bool = False
) -> tuple[int, str]:
    """The status of an answer to a browser without a sign-in, and its text without tags."""

    async def identify(_token: str) -> str:
        raise AssertionError("nobody signs in")

    console = Console("127.0.0.1:1", tls=None, is_guarded=is_guarded, clock=SystemClock())
    try:
        answer = await console.answer(
            PageRequest(
                method=method, path=path, query={}, cookies={}, form=form or {}, identify=identify
            )
        )
    finally:
        await console.close()
    return answer.status, " ".join(re.sub("<[^>]*>", " ", answer.body.decode()).split())


async def test_page_that_does_not_exist_has_no_advice_about_a_message():
    status, text = await answered("GET", "/nosuch")
    assert status == 404
    assert "There is no such page in the console To the overview" in text


async def test_form_of_before_a_restart_says_so():
    status, text = await answered("POST", "/act/resize", {"csrf": "made before", "step": "plan"})
    assert status == 403
    assert "the metaserver was restarted since. Look at the form again." in text
    assert "sign-in" not in text


async def test_act_that_is_refused_says_once_that_nothing_was_done(monkeypatch):
    monkeypatch.setattr("keylane.console.app.is_own_form", lambda _secret, _given: True)
    form = {"subject": "orders", "partitions": "none", "step": "plan"}
    status, text = await answered("POST", "/act/resize", form)
    assert status == 400
    assert text.count("Nothing was done") == 1
    assert "Fix what the message names, then try again." in text


async def test_page_of_parked_messages_that_fails_leads_to_the_parked_keys():
    status, text = await answered("POST", "/subjects/orders/groups/billing/parked/messages")
    assert status == 400
    assert "To the group's parked keys" in text.replace("&#39;", "'")


async def test_sign_out_whose_sign_in_has_ended_already_is_no_error():
    form = {"csrf": "made under the sign-in that has ended"}
    assert await answered("POST", "/sign-out", form, is_guarded=True) == (303, "")
