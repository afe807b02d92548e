"""Valid and invalid arguments of a reader."""

from __future__ import annotations

from typing import Any

import pytest

from keylane.consumer.reading.reader import check_arguments
from keylane.protocol.errors import ConfigError

NONE: dict[str, Any] = {
    "key": None,
    "partition": None,
    "where": None,
    "follow": False,
    "codec": None,
}


def generator(message: Any) -> Any:
    yield message


async def async_generator(message: Any) -> Any:
    yield message


def test_arguments_pass_when_each_can_work():
    check_arguments(**NONE)
    check_arguments(key="k", partition=None, where=None, follow=False, codec=None)
    check_arguments(key=b"k", partition=1, where=bool, follow=True, codec=None)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"key": ""}, "non-empty bytes or text"),
        ({"key": b""}, "non-empty bytes"),
        ({"key": 7}, "non-empty bytes"),
        ({"partition": 0}, "1 or higher"),
        ({"where": 7}, "plain function of a message"),
        ({"where": generator}, "plain function of a message"),
        ({"where": async_generator}, "plain function of a message"),
        ({"follow": "no"}, "follow must be True or False"),
    ],
)
def test_arguments_are_refused_when_one_cannot_work(wrong, told):
    with pytest.raises(ConfigError, match=told):
        check_arguments(**NONE | wrong)
