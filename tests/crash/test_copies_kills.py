"""A broker and two copies that acks wait for, killed, stopped and lost under load: every acked
message is on every copy of the set, and each key is in order.

What is acked is looked for with a reader of segments that shares no code with the product.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from crash.test_acked_copies import promote
from crash.test_warm_spare import segments_of
from judge.segments import read_folder
from keylane import Producer
from keylane.admin import Admin
from keylane.errors import KeylaneError, UnavailableError
from support.cluster import Cluster
from support.ports import free_port
from support.postgres import running_postgres
from support.server_process import ServerProcess

SUBJECT = "orders"
KEYS = 50
COPIES = 2
KINDS = ("kill", "kill", "stop", "lose_copy", "lose_broker", "kill_all", "kill_metaserver")
FAILOVERS = ("kill_broker", "hang_broker", "stop_broker", "hand_over")
META_SETTINGS = "broker_heartbeat_ms = 200\nbroker_ttl_ms = 1_000\n"
BROKER_SETTINGS = "copy_lag_ms = 500\nsegment_bytes = 4_194_304\n"
pytestmark = [pytest.mark.crash]


class FolderHost:
    """A folder and the program on it: the broker of group g1, or a follower of it."""

    def __init__(self, cluster: Cluster, config: Path, folder: Path, *, fails_over: bool) -> None:
        self.folder = folder
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._fails_over = fails_over
        self._arguments = (
            *("--group", "g1", "--data", str(folder), "--config", str(config)),
            *("--meta", ",".join(cluster.addresses), "--port", str(port)),
            *("--failover", str(fails_over).lower()),
        )
        self._process: ServerProcess | None = None

    def start(self, *, follows: bool) -> None:
        more = ("--follow", "true") if follows else ()
        self._process = ServerProcess("keylane.broker", (*self._arguments, *more))
        if not (follows or self._fails_over):
            assert self._process.stdout.readline(), "the broker did not start"

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.stdout.close()
            process.wait(60)

    def lose(self) -> None:
        """Kill it and remove its folder, which it may not have made yet."""
        self.kill()
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def stop(self) -> None:
        """Stop it in good order."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        self.kill()

    @property
    def copy_id(self) -> str:
        path = self.folder / "copy.json"
        return str(json.loads(path.read_bytes())["copy_id"]) if path.exists() else ""


class CopiesStage:
    """A cluster whose broker has copies, a producer that sends on and on, and what it was told."""

    def __init__(self, cluster: Cluster, folder: Path, *, fails_over: bool = False) -> None:
        self.cluster = cluster
        self.fails_over = fails_over
        self._folder = folder
        self._config = folder / "copied-broker.toml"
        self._config.write_text(BROKER_SETTINGS)
        self._numbers = itertools.count()
        self.broker = self._new_host()
        self.copies = [self._new_host() for _ in range(COPIES)]
        self.acked: list[int] = []
        """The numbers of the messages that were acked."""
        self.errors: list[str] = []
        """What the producer was told of the others."""
        self.faults = 0
        self.promotions = 0
        self._sends = True

    def _new_host(self) -> FolderHost:
        folder = self._folder / f"host-{next(self._numbers)}"
        return FolderHost(self.cluster, self._config, folder, fails_over=self.fails_over)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self.broker.start, follows=False)
        try:
            async with Admin(self.cluster.meta) as admin:
                await _create(admin)
                await admin.set_copies("g1", 1 + COPIES, may_share_machine=True)
            for copy in self.copies:
                await asyncio.to_thread(copy.start, follows=True)
            self._sending = asyncio.create_task(self._send())
            yield
            await self.end_sending()
        finally:
            for host in (self.broker, *self.copies):
                await asyncio.to_thread(host.kill)

    async def end_sending(self) -> None:
        """Send nothing more; returns when all was acked or has failed."""
        self._sends = False
        await self._sending

    async def _send(self) -> None:
        """Send numbered messages, a few at a time, and note those that were acked."""
        numbers = itertools.count()
        async with Producer(",".join(self.cluster.addresses)) as producer:
            while self._sends:
                sent = {}
                for number in itertools.islice(numbers, 20):
                    key = b"key-%d" % (number % KEYS)
                    sent[number] = asyncio.ensure_future(
                        producer.send(SUBJECT, b"%d" % number, key=key)
                    )
                for each, future in sent.items():
                    try:
                        await future
                    except KeylaneError as error:
                        self.errors.append(repr(error))
                        continue
                    self.acked.append(each)

    async def members(self) -> list[FolderHost]:
        await self.find_broker()
        async with Admin(",".join(self.cluster.addresses)) as admin:
            ids = (await admin.copies("g1")).members
        return [copy for copy in self.copies if copy.copy_id in ids]

    async def wait_for_members(self, count: int, seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while len(await self.members()) < count:
                await asyncio.sleep(0.1)

    async def wait_for_acks(self, count: int) -> None:
        """Wait until more messages were acked."""
        wanted = len(self.acked) + count
        async with asyncio.timeout(60):
            while len(self.acked) < wanted:
                await asyncio.sleep(0.05)

    async def find_broker(self) -> None:
        """Note which host serves now."""
        if not self.fails_over:
            return
        async with Admin(",".join(self.cluster.addresses)) as admin, asyncio.timeout(60):
            while True:
                by_address = {each.address: each for each in (self.broker, *self.copies)}
                for view in (await admin.list_brokers()).brokers:
                    host = by_address.get(view.address)
                    if view.available and host is not None:
                        if host is not self.broker:
                            self.copies[self.copies.index(host)] = self.broker
                            self.broker = host
                            self.promotions += 1
                        return
                await asyncio.sleep(0.1)

    # ── faults ────────────────────────────────────────────────────────────────────────────────────
    async def strike(self, kind: str, rng: random.Random) -> None:
        """One fault of a kind; the host is back afterwards."""
        self.faults += 1
        host = rng.choice((self.broker, *self.copies))
        if kind == "lose_broker" and self.fails_over:
            await self.wait_for_members(1)
            await self._lose_serving(self.broker)
        elif kind == "lose_broker":
            await self.wait_for_members(1)
            await self._lose_broker(rng.choice(await self.members()))
        elif kind == "lose_copy":
            copy = rng.choice(self.copies)
            await asyncio.to_thread(copy.lose)
            await asyncio.to_thread(copy.start, follows=True)
        elif kind == "kill_metaserver":
            metaserver = rng.choice(self.cluster.metas)
            await asyncio.to_thread(metaserver.kill)
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            await asyncio.to_thread(metaserver.restart)
        elif kind == "hand_over":
            await self.wait_for_members(1)
            async with Admin(",".join(self.cluster.addresses)) as admin:
                await admin.hand_over("g1")
        elif kind == "hang_broker":
            await self.wait_for_members(1)
            self.broker.signal(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(1.5, 4.0))
            self.broker.signal(signal.SIGCONT)
        elif kind in {"kill_broker", "stop_broker"}:
            await self.wait_for_members(1)
            stopped = self.broker
            await asyncio.to_thread(stopped.kill if kind == "kill_broker" else stopped.stop)
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            await asyncio.to_thread(stopped.start, follows=True)
        elif kind == "stop":
            host.signal(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(0.05, 1.5))
            host.signal(signal.SIGCONT)
        else:
            hosts = (self.broker, *self.copies) if kind == "kill_all" else (host,)
            for each in hosts:
                await asyncio.to_thread(each.kill)
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            for each in hosts:
                follows = self.fails_over or each is not self.broker
                await asyncio.to_thread(each.start, follows=follows)

    async def _lose_serving(self, lost: FolderHost) -> None:
        """The broker's folder is gone for good; its host begins a copy once another serves."""
        before = self.promotions
        await asyncio.to_thread(lost.lose)
        while self.promotions == before:
            await self.find_broker()
        await asyncio.to_thread(lost.start, follows=True)

    async def _lose_broker(self, member: FolderHost) -> None:
        """The broker and its folder are gone for good; a copy of the set takes its place, and
        another host begins a copy.
        """
        lost = self.broker
        await asyncio.to_thread(lost.lose)
        await asyncio.to_thread(member.kill)
        async with asyncio.timeout(30):
            while (
                done := await asyncio.to_thread(promote, self.cluster, member.folder)
            ).returncode:
                assert "BROKER_SERVES" in done.stderr, done.stderr
                await asyncio.sleep(0.2)
        self.promotions += 1
        self.copies.remove(member)
        self.broker = member
        await asyncio.to_thread(member.start, follows=False)
        self.copies.append(self._new_host())
        await asyncio.to_thread(self.copies[-1].start, follows=True)

    # ── judging ───────────────────────────────────────────────────────────────────────────────────
    async def judge_members(self) -> None:
        """The broker and every copy of the set have every message that was acked, as their segments
        have it.
        """
        acked = set(self.acked)
        members = await self.members()
        for host in (self.broker, *members):
            missing = acked - await asyncio.to_thread(stored_numbers, host.folder)
            assert not missing, f"{host.folder} lacks {sorted(missing)[:5]}"


async def _create(admin: Admin) -> None:
    """Create the subject, once the broker has reported itself."""
    async with asyncio.timeout(30):
        while True:
            try:
                await admin.create_subject(SUBJECT, partitions=3)
            except UnavailableError:
                await asyncio.sleep(0.1)
            else:
                return


def stored_numbers(folder: Path) -> set[int]:
    """The numbers of the messages in a folder; each key's are in order, and none comes twice."""
    partitions, problems = read_folder(folder)
    assert not problems, problems[:3]
    by_key: dict[bytes, list[int]] = defaultdict(list)
    for _, partition in sorted(partitions.items()):
        for _, message in sorted(partition.messages.items()):
            by_key[message.key].append(int(message.value))
    for key, numbers in by_key.items():
        assert all(one < two for one, two in itertools.pairwise(numbers)), key
    return {number for numbers in by_key.values() for number in numbers}


def assert_equal_segments(folder: Path, copy: Path) -> None:
    """Byte for byte, above the first position of both."""
    ours, theirs = segments_of(folder), segments_of(copy)
    common = sorted(ours.keys() & theirs.keys())
    assert common
    for name in common:
        assert ours[name].rstrip(b"\0") == theirs[name].rstrip(b"\0"), name


async def run_faults(
    stage: CopiesStage, kinds: Iterable[str], rng: random.Random, *, judged_every: int
) -> None:
    async with stage.running():
        await stage.wait_for_members(COPIES)
        for number, kind in enumerate(kinds):
            await stage.find_broker()
            await stage.strike(kind, rng)
            await stage.wait_for_acks(100)
            if number % judged_every == 0:
                await stage.judge_members()
        await stage.wait_for_members(COPIES)
        await stage.wait_for_acks(100)
        await stage.judge_members()
    assert set(stage.acked) <= stored_numbers(stage.broker.folder)
    for copy in stage.copies:
        assert_equal_segments(stage.broker.folder, copy.folder)


@contextmanager
def cluster_of_one(folder: Path) -> Iterator[Cluster]:
    with Cluster(folder, 0, meta_settings=META_SETTINGS) as cluster:
        yield cluster


@pytest.mark.timeout(300)
async def test_acked_messages_are_on_every_copy_when_programs_are_killed_and_folders_lost(
    tmp_path: Path,
) -> None:
    with cluster_of_one(tmp_path) as cluster:
        stage = CopiesStage(cluster, tmp_path)
        kinds = ("kill_all", "lose_broker", "stop", "lose_copy", "kill", "lose_broker")
        await run_faults(stage, kinds, random.Random(4), judged_every=1)
    assert stage.promotions == 2


@pytest.mark.timeout(300)
async def test_copy_takes_the_place_of_its_broker_when_that_is_gone_or_hangs(
    tmp_path: Path,
) -> None:
    """By itself, and the folder of the broker before becomes a copy."""
    with cluster_of_one(tmp_path) as cluster:
        stage = CopiesStage(cluster, tmp_path, fails_over=True)
        kinds = ("kill_broker", "lose_broker", "hang_broker", "kill_all", "stop_broker")
        await run_faults(stage, kinds, random.Random(4), judged_every=1)
    assert stage.promotions >= 4


@pytest.mark.whole
@pytest.mark.timeout(4 * 3_600)
async def test_acked_messages_are_on_every_copy_through_a_thousand_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_postgres() as server:
        settings = f'{META_SETTINGS}database_url = "{server.url()}"\n'
        with Cluster(tmp_path, 0, meta_settings=settings, metas=2) as cluster:
            stage = CopiesStage(cluster, tmp_path, fails_over=True)
            rng = random.Random(1)
            kinds = [rng.choice((*KINDS, *FAILOVERS)) for _ in range(1_000)]
            await run_faults(stage, kinds, rng, judged_every=5)
    with capsys.disabled():
        print(f"\n{stage.faults} faults, {stage.promotions} promotions, {len(stage.acked)} acked")
    assert stage.promotions > 50
    assert len(stage.acked) >= 300_000
