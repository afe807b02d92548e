"""What mutants of partition sessions have in common."""

from __future__ import annotations

from typing import Any

from keylane.consumer.session import step
from sim.mutants.mutant import Patches


def on_event(patches: Patches, kind: type, change: Any) -> Any:
    """Replace what `step` does with an event; returns what it did."""
    before = step._APPLY[kind]
    patches.set(step, "_APPLY", {**step._APPLY, kind: change})
    return before


class ForgivingKeys(dict[bytes, Any]):
    """Busy keys of lanes, which may be freed twice."""

    def __missing__(self, _key: bytes) -> None:
        return None

    def __delitem__(self, key: bytes) -> None:
        self.pop(key, None)


class NeverBusy(ForgivingKeys):
    """Busy keys of lanes, of which none is."""

    def __setitem__(self, _key: bytes, _waiting: Any) -> None:
        """Forget it."""
