"""Checks whether the broker group still belongs to this data folder, by the answers of metaservers.
Pure.

A broker that is started on an older copy of a folder may have the address of the broker on the
newer folder, so clients call it.
"""

from __future__ import annotations

from typing import Protocol

from ..protocol.errors import WrongBrokerError


class Standing(Protocol):
    """The part of a `Registration` that knows the standing of a data folder."""

    @property
    def set_aside(self) -> str:
        """Why the broker group belongs to another folder; "" unless a metaserver says so."""
        ...

    @property
    def asked(self) -> bool:
        """True once the first report has ended, answered or not."""
        ...

    @property
    def accepted(self) -> bool:
        """True if a metaserver has accepted a report of this opening and refused none since; no old
        copy is accepted.
        """
        ...

    async def wait_accepted(self) -> None:
        """Wait until `accepted` is true."""
        ...

    async def wait_asked(self) -> None:
        """Wait until `asked` is true."""
        ...


async def check_standing(standing: Standing | None) -> None:
    """Raise WrongBrokerError if the broker group belongs to another folder. This is called before
    state is changed.
    """
    if standing is None:
        return
    if not standing.asked:
        await standing.wait_asked()
    if standing.set_aside:
        raise WrongBrokerError(f"this broker does not serve its group: {standing.set_aside}")
