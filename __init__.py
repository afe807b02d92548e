"""keylane: messages of one order key keep their order.

The public face: `Producer`, `Consumer`, `QueueReader`, `Message`, `Receipt` and every error.  Names are loaded when
they are first used, so importing keylane starts nothing and imports no network library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .consumer import Consumer as Consumer
    from .consumer import QueueReader as QueueReader
    from .producer import Producer as Producer
    from .protocol.errors import *  # noqa: F403
    from .protocol.message import Message as Message
    from .protocol.message import Receipt as Receipt

__version__ = "0.1.0"

_HOME_OF = {
    "Producer": ".producer",
    "Consumer": ".consumer",
    "QueueReader": ".consumer",
    "Message": ".protocol.message",
    "Receipt": ".protocol.message",
}


def _error_names() -> list[str]:
    """Return the names of the error tree, which `protocol/errors.py` keeps."""
    return list(import_module(".protocol.errors", __name__).__all__)


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return [*_HOME_OF, *_error_names()]
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME_OF.get(name)
    if home is None and name in _error_names():
        home = ".protocol.errors"
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_error_names()})
