"""Reloads a running program's settings on SIGHUP."""

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
    The reloadable settings of a running program.

    Args:
        read: reads the settings in the same way as at startup.
        allowed: the names of the settings that may change while the program runs.
        adopt: called with the new settings after each reload.
    """

    def __init__(
        self,
        settings: Settings,
        read_settings: Callable[[], Settings],
        allowed: Collection[str],
        adopt: Callable[[Settings], object],
    ) -> None:
        self.settings = settings
        self._read_settings = read_settings
        self._allowed = allowed
        self._adopt = adopt

    def reload(self) -> None:
        """Read the settings again, and apply those that are allowed to change. If any setting is
        invalid, apply none.
        """
        try:
            new_settings = self._read_settings()
        except ConfigError as error:
            log.error("cannot reload the settings: %s", error.message)
            return
        old_values, new_values = field_values(self.settings), field_values(new_settings)
        changed_names = [name for name in new_values if new_values[name] != old_values[name]]
        applied_values: dict[str, Any] = {
            name: new_values[name] for name in changed_names if name in self._allowed
        }
        restart_names = [name for name in changed_names if name not in self._allowed]
        self.settings = replace(self.settings, **applied_values)  # type: ignore[type-var]
        level = applied_values.get("log_level")
        if level is not None:
            logging.getLogger("keylane").setLevel(level)
        self._adopt(self.settings)
        if applied_values:
            log.warning("settings reloaded: %s", ", ".join(sorted(applied_values)))
        elif not restart_names:
            log.info("reloaded the settings; nothing changed")
        if restart_names:
            log.warning("these settings need a restart: %s", ", ".join(restart_names))
