"""In-memory clusters with virtual time, for testing programs that use keylane: `run`, and a pytest
plugin.

Names are loaded on first use, because pytest imports the plugin in every run, and most runs have no
cluster.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cluster import VirtualCluster, run
    from .programs import BrokerProgram, ClientProgram, MetaserverProgram, StoryProgram

__all__ = [
    "BrokerProgram",
    "ClientProgram",
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
        return getattr(import_module(home, __name__), name)
