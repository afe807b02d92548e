"""The stacks of a test that reaches its time-out, on the standard error of the process that pytest
was started with.

pytest-timeout writes them where a worker of xdist has no terminal, and ends the worker: xdist tells
only that it is gone.
"""

from __future__ import annotations

import faulthandler
import os
from typing import Any

import pytest

BEFORE_S = 1.0
"""The stacks are written so long before pytest-timeout ends the process."""


class StackDumps:
    """A plugin; made while pytest captures nothing, so that it has the standard error that a person
    or a log sees.
    """

    def __init__(self) -> None:
        self._errors = os.fdopen(os.dup(2), "w")

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, settings: Any) -> None:
        """Begin to count beside pytest-timeout, which is asked next."""
        if settings.timeout and settings.timeout > 0:
            after_s = max(settings.timeout - BEFORE_S, settings.timeout / 2)
            faulthandler.dump_traceback_later(after_s, file=self._errors)

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_cancel_timer(self) -> None:
        """The test has ended."""
        faulthandler.cancel_dump_traceback_later()

    def pytest_unconfigure(self) -> None:
        """Close the copy of the standard error."""
        faulthandler.cancel_dump_traceback_later()
        self._errors.close()
