"""In-memory clusters with virtual time, for testing programs that use keylane: `run`, and a pytest
plugin.

Names are loaded on first use, because pytest imports the plugin in every run, and most runs have no
cluster.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ..protocol.errors import MissingExtraError

if TYPE_CHECKING:
    from .cluster import VirtualCluster, run
    from .programs import (
        BrokerProgram,
        ClientProgram,
        FollowerProgram,
        MetaserverProgram,
        StoryProgram,
    )

__all__ = [
    "BrokerProgram",
    "ClientProgram",
    "FollowerProgram",
    "MetaserverProgram",
    "StoryProgram",
    "VirtualCluster",
    "run",
]

if not TYPE_CHECKING:  # lets a type checker report names that are not listed above

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = ".cluster" if name in {"VirtualCluster", "run"} else ".programs"
        try:
            module = import_module(home, __name__)
        except ModuleNotFoundError as error:
            raise MissingExtraError.of(error, "keylane.testing", "testing") from error
        return getattr(module, name)

    def __dir__() -> list[str]:
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
