"""Reloads a running program's settings at SIGHUP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Generic, TypeVar

from ...protocol.errors import ConfigError
from ...protocol.settings import field_values

Settings = TypeVar("Settings")

log = logging.getLogger("keylane.rpc")


class ReloadableSettings(Generic[Settings]):
    """
    The settings of a running program, which can be reloaded.

    Args:
        read: reads the settings in the same way as at the start.
        allowed: names of the settings that may change while the program runs.
        adopt: called with the new settings after each reload.
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
        """Read the settings again, and apply those that are allowed to change; if any is invalid,
        apply none.
        """
        try:
            new_settings = self._read()
        except ConfigError as error:
            log.error("cannot reload the settings: %s", error.message)
            return
        before, after = field_values(self.settings), field_values(new_settings)
        changed = [name for name in after if after[name] != before[name]]
        applied: dict[str, Any] = {name: after[name] for name in changed if name in self._allowed}
        need_restart = [name for name in changed if name not in self._allowed]
        self.settings = replace(self.settings, **applied)  # type: ignore[type-var]
        level = applied.get("log_level")
        if level is not None:
            logging.getLogger().setLevel(level)
        self._adopt(self.settings)
        if applied:
            log.warning("settings reloaded: %s", ", ".join(sorted(applied)))
        elif not need_restart:
            log.info("reloaded the settings; nothing changed")
        if need_restart:
            log.warning("these settings need a restart: %s", ", ".join(need_restart))
