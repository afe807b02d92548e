"""Checks the arguments of a reader, except those for where it begins and stops."""

from __future__ import annotations

import inspect

from ...protocol.codecs.codec import Codec, V, check_codec
from ...protocol.errors import ConfigError
from ...protocol.settings import flag_problems, is_within, refuse

_NOT_PLAIN = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
"""The checks for functions whose result is always true, whatever the message is."""


def check_arguments(
    *, key: object, partition: object, where: object, follow: object, codec: Codec[V] | None
) -> None:
    """Check the other arguments of a reader. Raises ConfigError."""
    refuse(flag_problems(follow=follow))
    if codec is not None:
        check_codec(codec)
    if key is not None and (not isinstance(key, bytes) or not key):
        tip = ": use key.encode()" if isinstance(key, str) and key else ""
        raise ConfigError(f"key is bytes, at least one, not {key!r:.40}{tip}")
    if partition is not None and not is_within(partition, 1, 2**63 - 1):
        raise ConfigError(f"partition is the id of a partition, from 1 on, not {partition!r:.40}")
    if where is not None and (not callable(where) or any(is_kind(where) for is_kind in _NOT_PLAIN)):
        raise ConfigError(f"where is a plain function of a message, not {where!r:.60}")
