"""Whether a data folder stands for its broker group, as far as a metaserver has said.  Pure.

An older copy of a folder, started in place of the newer one, has the same address: clients and metaservers call it.
"""

from __future__ import annotations

from typing import Protocol

from ..protocol.errors import WrongBrokerError


class Standing(Protocol):
    """The part of a `Registration` that says it."""

    @property
    def set_aside(self) -> str:
        """Why another folder stands for the group; "" unless a metaserver says so."""
        ...

    @property
    def asked(self) -> bool:
        """True once the first report has ended, answered or not."""
        ...

    @property
    def accepted(self) -> bool:
        """True if a metaserver has accepted a report of this opening and refused none since; else it may be an old copy."""
        ...

    async def wait_accepted(self) -> None:
        """Wait until `accepted` is true."""
        ...

    async def wait_asked(self) -> None:
        """Wait until `asked` is true."""
        ...


async def check_standing(standing: Standing | None) -> None:
    """Raises WrongBrokerError if another folder stands for the group; for calls that change state."""
    if standing is None:
        return
    if not standing.asked:
        await standing.wait_asked()
    if standing.set_aside:
        raise WrongBrokerError(f"nothing is served here: {standing.set_aside}")
