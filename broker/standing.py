"""Whether a data folder stands for its broker group, as far as a metaserver has said.  Pure.

An older copy of a folder that is started in the place of the newer one has its address, so clients and metaservers ask it.
"""

from __future__ import annotations

from typing import Protocol

from ..protocol.errors import WrongBrokerError


class Standing(Protocol):
    """What a `Registration` knows of it."""

    @property
    def set_aside(self) -> str:
        """Why another one does; "" while nobody says so."""
        ...

    @property
    def asked(self) -> bool:
        """Has the first question ended, answered or not."""
        ...

    @property
    def welcome(self) -> bool:
        """Has a metaserver taken a report of this opening, and refused none since?  Else the folder may be an old copy."""
        ...

    async def wait_welcome(self) -> None:
        """Wait until `welcome` is true."""
        ...

    async def wait_asked(self) -> None:
        """Wait for its end."""
        ...


async def check_standing(standing: Standing | None) -> None:
    """Let calls through that change something.  Raises WrongBrokerError: another folder stands for the group."""
    if standing is None:
        return
    if not standing.asked:
        await standing.wait_asked()
    if standing.set_aside:
        raise WrongBrokerError(f"nothing is served here: {standing.set_aside}")
