"""The clients of programs without an event loop take what the others take."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import keylane
import keylane.sync
from keylane.errors import ConfigError

MISSING = {
    ("Consumer", "__init__"): {"handler", "batch_handler"},
    ("Producer", "send_all"): {"await_every"},
}
"""What needs an event loop."""
MORE = {("Producer", "flush"): {"timeout_s"}}
"""What stands in for cancelling the call."""
NEEDED = {("Consumer", "__init__"): {"subject"}}
"""What has a default where there are handlers of several subjects."""


def parameters(function: Any) -> dict[str, tuple[Any, Any]]:
    taken = inspect.signature(function).parameters
    return {
        name: (each.kind, each.default) for name, each in taken.items() if not name.startswith("_")
    }


@pytest.mark.parametrize("client", ["Consumer", "Producer"])
def test_sync_client_takes_what_the_async_one_takes(client: str):
    theirs, ours = getattr(keylane, client), getattr(keylane.sync, client)
    compared = 0
    for name in ("__init__", *(name for name in vars(ours) if not name.startswith("_"))):
        if not callable(getattr(ours, name)) or name not in vars(theirs):
            continue
        where, expected = (client, name), parameters(getattr(theirs, name))
        given = parameters(getattr(ours, name))
        for parameter in MISSING.get(where, ()):
            del expected[parameter]
        for parameter in MORE.get(where, ()):
            del given[parameter]
        for parameter in NEEDED.get(where, ()):
            assert given[parameter][1] is inspect.Parameter.empty
            given[parameter] = expected[parameter]
        assert list(given.items()) == list(expected.items()), where
        compared += 1
    assert compared >= 7


def test_consumer_takes_what_the_readme_shows():
    """Everything else is a setting."""
    names = [name for name in parameters(keylane.Consumer) if name != "others"]
    assert names == [
        *("meta", "subject", "group", "handler", "batch_handler", "codec", "start"),
        *("ack", "on_failure", "tries_max", "settings", "wait_s", "tls", "token"),
    ]


@pytest.mark.parametrize("name", ["handler", "threads", "concurrency", "max_wait_ms", "on_lost"])
def test_consumer_refuses_what_only_a_handler_uses(name: str):
    """At once, and not with an advice that leads into another refusal."""
    with pytest.raises(ConfigError, match=f"takes no {name}=: take messages in a loop"):
        keylane.sync.Consumer("127.0.0.1:1", subject="s", group="g", **{name: 3})
