"""Checks the arguments that a program passes to a producer. Pure."""

from __future__ import annotations

from ..protocol.errors import ConfigError, InvalidRequestError
from ..protocol.routing import OrderStrategy
from ..protocol.settings import is_within, range_problem
from .placing import Partitioner
from .settings import ProducerSettings

TIMEOUT_MS_MAX = 1_000_000_000_000


def checked_strategy(strategy: OrderStrategy | str | None) -> OrderStrategy | None:
    """Return the order strategy that the text names. Raises ConfigError."""
    try:
        return None if strategy is None else OrderStrategy(strategy)
    except ValueError:
        spelled = " or ".join(OrderStrategy)
        raise ConfigError(f"order_strategy is {spelled}, not {strategy!r:.40}") from None


def checked_partitioner(partitioner: Partitioner | None) -> Partitioner | None:
    """Return the partitioner. Raises ConfigError if it is not callable."""
    if partitioner is not None and not callable(partitioner):
        raise ConfigError(f"partitioner must be callable, not {partitioner!r:.40}")
    return partitioner


def checked_settings(settings: ProducerSettings | None) -> ProducerSettings:
    """Return the settings, or the defaults if there are none. Raises ConfigError."""
    if settings is None:
        return ProducerSettings()
    if not isinstance(settings, ProducerSettings):
        raise ConfigError(f"settings must be ProducerSettings, not {settings!r:.40}")
    return settings


def checked_timeout(timeout_ms: int) -> int:
    """Return the time-out. Raises InvalidRequestError if it is out of range."""
    if not is_within(timeout_ms, 1, TIMEOUT_MS_MAX):
        raise InvalidRequestError(range_problem("timeout_ms", timeout_ms, 1, TIMEOUT_MS_MAX))
    return timeout_ms
