"""Metaservers that take heartbeats and answer none: a session finds one that answers before its
lease ends.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable

import pytest

from keylane.consumer.group.heartbeats import HeartbeatTimeouts
from keylane.consumer.group.membership import Member, Membership
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.control import Grants, Heartbeat, Joined
from keylane.protocol.errors import NotSentError, OutcomeUnknownError
from keylane.rpc.client import MetaClient
from keylane.testing.machines.loop import SimLoop
from support.quiet_holder import QuietHolder

TTLS_MS = [1_000, 2_000, 6_000, 30_000]
HEARTBEAT_MS_MAX = 5_000


class LoopClock:
    """The virtual time of a simulated event loop, which the loop itself moves: no test could move a
    ManualClock along with it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def boot_ms(self) -> int:
        return int(self._loop.time() * 1_000)

    def boot_ns(self) -> int:
        return int(self._loop.time() * 1_000_000_000)


class Metaservers:
    """Several metaservers as a network: each answers after `answer_ms`, hangs from `hang_at_ms` on,
    or is off.
    """

    def __init__(self, clock: LoopClock, *, ttl_ms: int, answer_ms: int) -> None:
        self.clock = clock
        self.ttl_ms = ttl_ms
        self.answer_ms = answer_ms
        self.hanging: set[str] = set()
        self.hang_at_ms = 1 << 60
        self.off: set[str] = set()
        self.asked: list[tuple[int, str, int]] = []
        """(time, address, version) of each heartbeat."""

    def _hangs(self, address: str) -> bool:
        return address in self.hanging and self.clock.boot_ms() >= self.hang_at_ms

    async def control(
        self,
        _method,
        address,
        _path,
        answer,
        *,
        body=None,
        query=None,
        timeout_ms=0,
        new_connection=False,
    ):
        if address in self.off:
            raise NotSentError
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                return await self._answer(address, answer, body)
        except TimeoutError:
            raise OutcomeUnknownError from None

    async def _answer(self, address: str, answer: type, body: object) -> object:
        if isinstance(body, Heartbeat):
            self.asked.append((self.clock.boot_ms(), address, body.known_version))
        await asyncio.sleep(self.answer_ms / 2_000)
        if isinstance(body, Heartbeat) and body.known_version >= 0 and not self._hangs(address):
            await asyncio.sleep(body.wait_ms / 1_000)
        if self._hangs(address):
            await asyncio.Event().wait()
        await asyncio.sleep(self.answer_ms / 2_000)
        if answer is Joined:
            return Joined(ttl_ms=self.ttl_ms, heartbeat_ms=min(HEARTBEAT_MS_MAX, self.ttl_ms // 3))
        return Grants(version=1, ttl_ms=self.ttl_ms, grants=()) if answer is Grants else answer()


class Session(QuietHolder):
    """A membership, and when its leases lapsed."""

    def __init__(self, network: Metaservers, addresses: list[str]) -> None:
        self.network = network
        self.lapsed: list[int] = []
        self._deadline_ms = 0
        self.membership = Membership(
            Member("s", "g", "c"),
            meta=MetaClient(network, addresses),
            settings=ConsumerSettings(ttl_ms=network.ttl_ms),
            clock=network.clock,
            rng=random.Random(1),
            identity=random.Random(2).getrandbits,
        )

    def apply_grants(self, _grants: Grants, deadline_ms: int) -> None:
        self.check()
        self._deadline_ms = deadline_ms

    def check(self) -> None:
        now_ms = self.network.clock.boot_ms()
        if self._deadline_ms and now_ms >= self._deadline_ms:
            self.lapsed.append(now_ms)


def simulate(
    *,
    ttl_ms: int,
    addresses: int,
    answer_ms: int,
    hang_ms: int,
    nudges_ms: list[int],
    prepare: Callable[[Metaservers, list[str]], None] = lambda network, names: None,
) -> Session:
    """Run a session whose metaservers hang from `hang_ms` on, all but one, with nudges at
    `nudges_ms`.
    """
    loop = SimLoop(random.Random(1))

    async def main() -> Session:
        network = Metaservers(LoopClock(loop), ttl_ms=ttl_ms, answer_ms=answer_ms)
        names = [f"meta-{number}" for number in range(addresses)]
        network.hanging = set(names[:-1])
        network.hang_at_ms = hang_ms
        prepare(network, names)
        session = Session(network, names)
        await session.membership.start(session)
        for at_ms in nudges_ms:
            loop.call_at(at_ms / 1_000, session.membership.nudge)
        await asyncio.sleep(hang_ms / 1_000 + 4 * ttl_ms / 1_000)
        session.check()
        session.membership._task.cancel()
        return session

    try:
        return loop.run_until_complete(main())
    finally:
        loop.dispose()


def latest_answer_ms(ttl_ms: int, addresses: int) -> int:
    """The time that an answer may take by the documented bound."""
    wait_ms = min(HEARTBEAT_MS_MAX, ttl_ms // 4)
    margin_ms = ttl_ms // 10
    return min((ttl_ms - margin_ms - 2 * wait_ms) // (addresses + 1), 1_000) - 10


@pytest.mark.parametrize("ttl_ms", TTLS_MS)
@pytest.mark.parametrize("addresses", [2, 3])
def test_leases_hold_while_all_metaservers_but_one_hang(ttl_ms, addresses):
    """Whenever they begin to hang, with or without a report at that moment, within the documented
    bound.
    """
    answer_ms = latest_answer_ms(ttl_ms, addresses)
    for hang_ms in range(2 * ttl_ms, 3 * ttl_ms, ttl_ms // 23):
        for nudges_ms in (
            [],
            [hang_ms + ttl_ms // 4],
            [hang_ms + ttl_ms * share // 100 for share in (5, 20, 35, 40, 45, 55)],
        ):
            session = simulate(
                ttl_ms=ttl_ms,
                addresses=addresses,
                answer_ms=answer_ms,
                hang_ms=hang_ms,
                nudges_ms=nudges_ms,
            )
            assert session.lapsed == [], (hang_ms, nudges_ms)
            assert session.network.asked[-1][1] == f"meta-{addresses - 1}"


def test_lease_holds_while_two_metaservers_are_off_and_one_hangs():
    """Of four metaservers the last one is found in time."""

    def prepare(network: Metaservers, names: list[str]) -> None:
        network.hanging = {names[1]}
        network.off = {names[2]}
        loop = asyncio.get_running_loop()
        loop.call_at(4.5, network.off.add, names[0])

    session = simulate(
        ttl_ms=2_000, addresses=4, answer_ms=20, hang_ms=4_000, nudges_ms=[], prepare=prepare
    )
    assert session.lapsed == []
    assert session.network.asked[-1][1] == "meta-3"


def test_nudge_does_not_break_off_a_heartbeat_that_is_answered_at_once():
    """Each answer is awaited, however often there is something to report."""
    session = simulate(
        ttl_ms=2_000,
        addresses=1,
        answer_ms=100,
        hang_ms=4_000,
        nudges_ms=list(range(1_000, 9_000, 30)),
    )
    assert session.lapsed == []
    asked = [at for at, _, version in session.network.asked if version < 0]
    gaps = [late - early for early, late in itertools.pairwise(asked)]
    assert min(gaps) >= 99


def test_metaserver_is_asked_four_times_per_ttl_without_a_hurry():
    """Every heartbeat to a metaserver that answers is a long poll."""
    session = simulate(ttl_ms=2_000, addresses=1, answer_ms=2, hang_ms=20_000, nudges_ms=[])
    assert len(session.network.asked) <= 4 * 14 + 2
    assert sum(version < 0 for _, _, version in session.network.asked) == 1


def test_hanging_metaservers_are_asked_with_pauses_after_the_lease_ended():
    """No address is asked in a tight loop."""

    def prepare(network: Metaservers, names: list[str]) -> None:
        network.hanging = set(names)

    session = simulate(
        ttl_ms=2_000, addresses=3, answer_ms=2, hang_ms=2_000, nudges_ms=[], prepare=prepare
    )
    asked = [address for at, address, _ in session.network.asked if at > 2_000]
    assert {"meta-0", "meta-1", "meta-2"} == set(asked)
    assert len(asked) < 30


def test_rest_of_the_lease_is_divided_among_the_addresses():
    """A long poll has its wait and a share; each address that has not failed has an equal share."""
    timeouts = HeartbeatTimeouts(addresses=3, ttl_ms=2_000, margin_ms=200, timeout_max_ms=5_000)
    timeouts.start_session(5_000)
    assert timeouts.wait_ms == 500
    assert timeouts.timeout_ms(500, wait_ms=500) == 500 + 266
    assert not timeouts.record_failure()
    assert timeouts.timeout_ms(1_266, wait_ms=0) == 267
    assert not timeouts.record_failure()
    assert timeouts.timeout_ms(1_533, wait_ms=0) == 267
    assert timeouts.record_failure()
    assert timeouts.timeout_ms(1_790, wait_ms=0) == 50
    assert timeouts.timeout_ms(1_800, wait_ms=0) == 600
    timeouts.record_grant(10_000)
    assert timeouts.timeout_ms(8_200, wait_ms=0) == 600
