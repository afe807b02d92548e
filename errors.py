# ruff: noqa: F403, PLC0414 - each name stands once, in the list that type checkers read
"""Every error that keylane raises on purpose, with its code, its fate and advice: see
`KeylaneError`.

The tree, drawn, is in `keylane.protocol.errors`; `keylane` itself has those that programs catch.
"""

from .protocol.errors.base import KeylaneError as KeylaneError
from .protocol.errors.failures import *
from .protocol.errors.reasons import Fate as Fate
from .protocol.errors.reasons import Reason as Reason
from .protocol.errors.reasons import RetryRule as RetryRule
from .protocol.errors.refusals import *
