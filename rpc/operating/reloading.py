"""Reloads changed settings at SIGHUP, while a program runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Generic, TypeVar

from ...protocol.errors import ConfigError
from ...protocol.settings import values_of

Settings = TypeVar("Settings")

log = logging.getLogger("keylane.rpc")


class Reloading(Generic[Settings]):
    """
    The settings of a running program.

    Args:
        read: reads the settings in the same way as at the start.
        allowed: names of the settings that may change while the program runs.
        adopt: called with the settings that hold from now on.
    """

    def __init__(
        self,
        settings: Settings,
        read: Callable[[], Settings],
        allowed: Collection[str],
        adopt: Callable[[Settings], object],
    ) -> None:
        self.settings = settings
        self._read = read
        self._allowed = allowed
        self._adopt = adopt

    def reload(self) -> None:
        """Read the settings again, and apply those that are allowed to change; if any of them has a
        mistake, apply none.
        """
        try:
            read = self._read()
        except ConfigError as error:
            log.error("cannot reload the settings: %s", error.message)
            return
        before, after = values_of(self.settings), values_of(read)
        changed = [name for name in after if after[name] != before[name]]
        taken: dict[str, Any] = {name: after[name] for name in changed if name in self._allowed}
        waiting = [name for name in changed if name not in self._allowed]
        self.settings = replace(self.settings, **taken)  # type: ignore[type-var]
        level = taken.get("log_level")
        if level is not None:
            logging.getLogger().setLevel(level)
        self._adopt(self.settings)
        if taken:
            log.warning("settings reloaded: %s", ", ".join(sorted(taken)))
        elif not waiting:
            log.info("reloaded the settings; nothing changed")
        if waiting:
            log.warning("these settings need a restart: %s", ", ".join(waiting))
