"""Capabilities that a metaserver signs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from keylane.metaserver.access.book import AccessState
from keylane.metaserver.access.service import AccessService
from keylane.protocol.access.capability import GRANTS_MAX, parse_capability
from keylane.protocol.access.rights import AccessGrant, Rights
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import OverloadedError


def service_of(groups: int) -> AccessService:
    """A service whose book has this number of groups, each with the most rights that one may
    have.
    """
    nothing: Any = None
    service = AccessService(nothing, clock=SystemClock(), settings_tokens={}, audit=nothing)
    grants = {
        f"group:{number}": tuple(
            AccessGrant(Rights.CONSUME, f"subject.{number}.{each}") for each in range(GRANTS_MAX)
        )
        for number in range(groups)
    }
    service.state = AccessState(cluster="c", grants=grants)
    return service


@pytest.mark.parametrize("groups", [1, 2])
def test_capability_has_the_rights_of_groups(groups: int) -> None:
    service = service_of(groups)
    caller = service.state.build_caller("jwt:ann", tuple(service.state.grants))
    capability, _packed, _signature = parse_capability(service.sign(caller, bytes(32)))
    assert len(capability.grants) == groups * GRANTS_MAX


def test_capability_is_refused_when_it_has_more_rights_than_a_header_holds() -> None:
    """Brokers would refuse it without saying why."""
    service = service_of(20)
    caller = service.state.build_caller("jwt:ann", tuple(service.state.grants))
    with pytest.raises(OverloadedError, match="with those of its 20 groups"):
        service.sign(caller)


def test_capability_has_the_version_of_its_rights_when_the_book_has_changed_since() -> None:
    """Brokers believed rights that were revoked while the call for the capability was under way."""
    service = service_of(1)
    service.state = replace(service.state, version=7)
    caller = service.state.build_caller("group:0")
    service.state = AccessState(cluster="c", version=8)
    capability, _packed, _signature = parse_capability(service.sign(caller, bytes(32)))
    assert capability.version == 7
    assert capability.grants == caller.grants


class OverlappingReads:
    """A database whose reads end when the test says so, each with the book as of its begin."""

    def __init__(self) -> None:
        self.version = 0
        self.ends: list[asyncio.Future[None]] = []

    async def read(self, _work: object, *_arguments: object) -> AccessState:
        book = AccessState(version=self.version)
        self.ends.append(asyncio.get_running_loop().create_future())
        await self.ends[-1]
        return book


async def overlapping(
    versions: tuple[int, int], order: tuple[int, int]
) -> tuple[OverlappingReads, AccessService]:
    """A database and its service, after two readings of these versions, which began one after the
    other and ended in `order`.
    """
    database: Any = OverlappingReads()
    nothing: Any = None
    service = AccessService(database, clock=SystemClock(), settings_tokens={}, audit=nothing)
    readings = []
    for version in versions:
        database.version = version
        readings.append(asyncio.create_task(service.refresh()))
        await asyncio.sleep(0)
    for number in order:
        database.ends[number].set_result(None)
        await readings[number]
    return database, service


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_access_service_keeps_what_was_granted_when_readings_overlap(
    order: tuple[int, int],
) -> None:
    """A principal was refused what had been granted a moment ago, and a token that had been revoked
    was valid.
    """
    database, service = await overlapping((1, 2), order)
    assert service.state.version == 2
    database.version = 1
    again = asyncio.create_task(service.refresh())
    await asyncio.sleep(0)
    database.ends[-1].set_result(None)
    await again
    assert service.state.version == 1, "a database that was restored from a backup counts"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_access_service_keeps_the_newer_version_when_the_reading_that_began_later_saw_the_older_one(
    order: tuple[int, int],
) -> None:
    """Each runs on a thread of its own, and the first may reach the database last."""
    _, service = await overlapping((2, 1), order)
    assert service.state.version == 2
