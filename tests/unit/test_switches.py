"""Every switch of the public clients and functions is True or False: "no" would be taken for True,
and 0 for False.

The calls are found by their annotations, so that a new one is in the test.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import keylane
import keylane.outbox
import keylane.sink
import keylane.sync
from keylane.protocol.errors import ClosedError, ConfigError, InvalidRequestError, KeylaneError
from keylane.protocol.settings import flag_problems

META = "127.0.0.1:1"
CLIENTS: dict[str, Callable[[], Any]] = {
    "Admin": lambda: keylane.Admin(META),
    "Producer": lambda: keylane.Producer(META),
    "sync.Producer": lambda: keylane.sync.Producer(META),
}
FUNCTIONS = {
    "outbox": [
        keylane.outbox.redrive_failed,
        keylane.outbox.purge_failed,
        keylane.outbox.purge_waiting,
    ]
}
GIVEN: dict[str, Any] = {
    "subject": "orders",
    "hidden": "job",
    "group": "billing",
    "meta": META,
    "broker_group": "g0",
    "broker_id": "b0",
    "copy_id": "c0",
    "log_end": 1,
    "to": "earliest",
    "partitions": 2,
    "wanted": 2,
    "partition_id": 1,
    "partition_ids": [1],
    "value": b"v",
    "source": None,
    "engine_or_url": "sqlite+aiosqlite:///nowhere/else.db",
}
"""Arguments that calls need."""
NO_SWITCHES = ("no", "yes", 0, 1, "", 1.5, [])


def is_switch(parameter: inspect.Parameter) -> bool:
    return str(parameter.annotation) in ("bool", "bool | None")


def switches() -> Iterator[Any]:
    """Client or None, call, and the name of a switch of it."""
    for name, make in CLIENTS.items():
        for method, function in inspect.getmembers(type(make()), inspect.isfunction):
            for parameter in inspect.signature(function).parameters.values():
                asked_first = not (name == "sync.Producer" and method == "send_arrow")  # is it open
                if is_switch(parameter) and not method.startswith("_") and asked_first:
                    yield pytest.param(
                        make, method, parameter.name, id=f"{name}.{method}-{parameter.name}"
                    )
    for room, functions in FUNCTIONS.items():
        for function in functions:
            for parameter in inspect.signature(function).parameters.values():
                if is_switch(parameter):
                    case = f"{room}.{function.__name__}-{parameter.name}"
                    yield pytest.param(None, function, parameter.name, id=case)


def called(make: Callable[[], Any] | None, call: Any, **given: Any) -> None:
    """Make the call and await or iterate what it returns; the client is open where it can be
    without a server.
    """

    async def run() -> None:
        client = make() if make is not None else None
        function = call if client is None else getattr(client, call)
        needed = {
            each.name: GIVEN[each.name]
            for each in inspect.signature(function).parameters.values()
            if each.default is each.empty or each.name == "value"
        }
        if isinstance(client, keylane.Admin):
            await client.__aenter__()
        try:
            result = function(**needed | given)
            if hasattr(result, "__anext__"):
                await anext(result)
            elif inspect.isawaitable(result):
                await result
        finally:
            if isinstance(client, keylane.Admin):
                await client.close()

    asyncio.run(run())


@pytest.mark.parametrize(("make", "call", "name"), list(switches()))
def test_switch_takes_neither_text_nor_number(make, call, name: str):
    for value in NO_SWITCHES:
        with pytest.raises(InvalidRequestError, match=rf"{name} must be True|bool.*{name}"):
            called(make, call, **{name: value})


def test_switches_that_are_there_are_in_this_test():
    tested = {(case.values[1], case.values[2]) for case in switches()}
    assert {("redrive", "all"), ("close", "flush"), ("set_subject", "dry_run")} <= tested
    assert (keylane.outbox.purge_waiting, "force") in tested
    assert len(tested) > 25


@pytest.mark.parametrize("value", NO_SWITCHES)
def test_reader_takes_no_other_follow_than_true_or_false(value: object):
    with pytest.raises(ConfigError, match="follow must be True or False"):
        keylane.Reader(META, "orders", follow=value)  # type: ignore[arg-type]


def test_true_and_false_are_switches():
    assert flag_problems(first=True, second=False) == []
    assert flag_problems(first=None, second=1) == [
        "first must be True or False, not None",
        "second must be True or False, not 1",
    ]


def test_close_without_a_reason_stays_quiet_on_a_client_that_is_not_open():
    keylane.sync.Producer(META).close(flush=False)
    with pytest.raises(ClosedError):
        keylane.sync.Producer(META).flush()


@pytest.mark.parametrize("subject", ["", 5, b"orders", "a b"])
@pytest.mark.parametrize(
    "call",
    [keylane.outbox.outbox_status, keylane.outbox.redrive_failed, keylane.outbox.purge_failed],
)
def test_outbox_refuses_a_subject_that_is_no_name(call, subject: object):
    with pytest.raises(KeylaneError, match="illegal name"):
        asyncio.run(call(GIVEN["engine_or_url"], subject=subject))
