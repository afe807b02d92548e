# ruff: noqa: F403 - each name stands once, in the list that type checkers read
"""Every error that keylane raises on purpose, with its code, its fate and advice: see
`KeylaneError`.

The tree, drawn, is in `keylane.protocol.errors`; `keylane` itself has those that programs catch.
"""

from .protocol.errors.access import *
from .protocol.errors.consuming import *
from .protocol.errors.deletions import *
from .protocol.errors.failures import *
from .protocol.errors.groups import *
from .protocol.errors.homes import *
from .protocol.errors.outbox import *
from .protocol.errors.parked import *
from .protocol.errors.publications import *
from .protocol.errors.reading import *
from .protocol.errors.refusals import *
from .protocol.errors.reprocess import *
from .protocol.errors.scheduled import *
from .protocol.errors.sink import *
from .protocol.errors.streaming import *
from .protocol.errors.testing import *
from .protocol.errors.transport import *
from .protocol.errors.versions import *
