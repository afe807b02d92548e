# ruff: noqa: F403, PLC0414 - each name is listed once, where type checkers read it
"""Every error that keylane raises deliberately, with its code, its fate and advice; see
`KeylaneError`.

A drawing of the class tree is in `keylane.protocol.errors`; `keylane` itself exports the errors
that programs usually catch.
"""

from .protocol import errors as _tree
from .protocol.errors.base import KeylaneError as KeylaneError
from .protocol.errors.failures import *
from .protocol.errors.reasons import Fate as Fate
from .protocol.errors.reasons import Reason as Reason
from .protocol.errors.reasons import RetryRule as RetryRule
from .protocol.errors.refusals import *


def __dir__() -> list[str]:
    """Return the public names, without what the modules of the errors import for themselves."""
    return sorted({*_tree.__all__, *(name for name in globals() if name.startswith("__"))})
