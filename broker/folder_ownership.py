"""Checks that this data folder still belongs to the broker group, according to the metaservers.
Pure.

A broker that is started on an older copy of a data folder may have the same address as the broker
of the newer folder, so clients might call it.
"""

from __future__ import annotations

from typing import Protocol

from ..protocol.errors import WrongBrokerError


class FolderOwnership(Protocol):
    """Says whether the metaservers accept the data folder. Implemented by `Registration`."""

    @property
    def set_aside(self) -> str:
        """The reason why the broker group belongs to another folder; "" if no metaserver has said
        so.
        """
        ...

    @property
    def has_reported(self) -> bool:
        """True once the first report has been answered or has failed, and `awaits_copies` is
        false.
        """
        ...

    @property
    def awaits_copies(self) -> bool:
        """True until the copies that acks wait for have what the log had at the start."""
        ...

    async def wait_copied(self) -> None:
        """Wait until `awaits_copies` is false. Raises OverloadedError if that takes too long."""
        ...

    @property
    def accepted(self) -> bool:
        """True if a metaserver has accepted a report of this opening, and none has refused one
        since, and `awaits_copies` is false. An older copy of the folder is never accepted.
        """
        ...

    async def wait_accepted(self) -> None:
        """Wait until `accepted` is true."""
        ...

    async def wait_reported(self) -> None:
        """Wait until `has_reported` is true. Raises OverloadedError if copies take too long."""
        ...


async def check_folder_ownership(folder_ownership: FolderOwnership | None) -> None:
    """Raise WrongBrokerError if the broker group belongs to another folder. Call this before every
    change of state.
    """
    if folder_ownership is None:
        return
    if not folder_ownership.has_reported:
        await folder_ownership.wait_reported()
    if folder_ownership.set_aside:
        raise _wrong_broker_error(folder_ownership)


def _wrong_broker_error(folder_ownership: FolderOwnership) -> WrongBrokerError:
    return WrongBrokerError(f"this broker does not serve its group: {folder_ownership.set_aside}")


async def check_copied(folder_ownership: FolderOwnership | None) -> None:
    """
    Wait until copies have what the log had at the start. Call this before every answer to an
    operator about what is stored. A folder that a metaserver refuses is no longer copied, and is
    described as it is, because an operator may accept it.

    Raises:
        OverloadedError: it takes too long.
    """
    if folder_ownership is None or folder_ownership.set_aside:
        return
    if folder_ownership.awaits_copies:
        await folder_ownership.wait_copied()


async def check_readable(folder_ownership: FolderOwnership | None) -> None:
    """
    Wait until copies have what the log had at the start. Call this before every answer to a client
    about messages and offsets. If the folder is refused before that, the end of its log may never
    have been durable: the broker in its place stores other messages at these offsets.

    Raises:
        OverloadedError: it takes too long.
        WrongBrokerError: a metaserver has refused the folder.
    """
    await check_copied(folder_ownership)
    if folder_ownership is not None and folder_ownership.awaits_copies:
        raise _wrong_broker_error(folder_ownership)
