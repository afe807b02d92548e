"""Control calls over connections that may be dead: which are repeated, over which connection, and
what they raise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from keylane.protocol import endpoints
from keylane.protocol.errors import OutcomeUnknownError, SubjectUnknownError
from keylane.rpc.liveness.control_calls import call_control, hedge


def ask(after_s: float, result: object) -> Callable[..., object]:
    """Return a call that ends after `after_s`, or raises OutcomeUnknownError at its timeout."""

    async def call(*, timeout_ms: int) -> object:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await asyncio.sleep(after_s)
        except TimeoutError:
            raise OutcomeUnknownError(f"none within {timeout_ms} ms") from None
        if isinstance(result, Exception):
            raise result
        return result

    return call


async def test_answer_in_time_is_the_only_one():
    """A call whose answer is not overdue is made once, even though the server itself waits."""
    again = ask(0, AssertionError("made again"))
    assert await hedge(ask(0.05, "first"), again, wait_ms=100, timeout_ms=200) == "first"


@pytest.mark.parametrize(
    ("first", "again", "answer"),
    [
        (ask(60, "first"), ask(0, "second"), "second"),
        (ask(0.1, "first"), ask(60, "second"), "first"),
        (ask(0.1, "first"), ask(0, OutcomeUnknownError("reset")), "first"),
        (ask(0.1, OutcomeUnknownError("reset")), ask(0.06, "second"), "second"),
    ],
)
async def test_answer_is_the_first_one_when_a_call_is_made_again(first, again, answer):
    assert await hedge(first, again, wait_ms=0, timeout_ms=200) == answer


@pytest.mark.parametrize(
    ("again", "error", "text"),
    [
        (ask(60, ""), OutcomeUnknownError, "none within 100 ms"),
        (ask(0, SubjectUnknownError(subject="x")), SubjectUnknownError, "x"),
    ],
)
async def test_error_is_that_of_the_first_call_unless_the_server_says_more(again, error, text):
    with pytest.raises(error, match=text):
        await hedge(ask(60, ""), again, wait_ms=0, timeout_ms=100)


class NotingNetwork:
    """Records on which connections calls are made; a pooled connection never answers."""

    def __init__(self) -> None:
        self.made: list[str] = []

    async def control(
        self, method, address, path, answer, *, body, query, timeout_ms, new_connection=False
    ):
        self.made.append("anew" if new_connection else "kept")
        return "answered" if new_connection else await ask(60, None)(timeout_ms=timeout_ms)


@pytest.mark.parametrize(
    ("endpoint", "made"),
    [
        (endpoints.SUBJECTS, ["kept", "anew"]),
        (endpoints.CREATE_SUBJECT, ["anew"]),
        (endpoints.RESET_GROUP, ["anew"]),
        (endpoints.LEAVE, ["anew"]),
        (endpoints.SUSPEND, ["anew"]),
        (endpoints.BROKER_HEARTBEAT, ["kept"]),
        (endpoints.HEARTBEAT, ["kept"]),
        (endpoints.JOIN, ["kept"]),
        (endpoints.RELEASE, ["kept"]),
    ],
)
async def test_call_takes_a_connection_that_is_kept_when_it_may_be_made_again(endpoint, made):
    network = NotingNetwork()
    try:
        answer = await call_control(network, endpoint, "a:1", "/", None, None, timeout_ms=50)
        assert answer == "answered"
    except OutcomeUnknownError:
        assert made == ["kept"]
    assert network.made == made
