"""A cluster of several hosts over a year: hosts join and leave, certificates, the authority and
tokens are replaced. The hosts are addresses of loopback, with real processes.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import shutil
import signal
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
from cryptography import x509

from keylane import Admin, TlsSettings, sync
from keylane.broker.settings import broker_settings
from keylane.cli.commands.cluster.certificates import CertificateAuthority
from keylane.cli.commands.cluster.folder import ClusterFolder
from keylane.cli.connection import wait_for_brokers
from keylane.cli.health import fetch_health
from keylane.protocol.access.tokens import token_hash
from keylane.protocol.control import Health
from keylane.protocol.errors import KeylaneError, UnauthenticatedError
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.tls.contexts import names_of
from support.ports import free_port
from support.server_process import ServerProcess, run_keylane

FIRST, SECOND, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"


class OperatedCluster:
    """
    The programs of some hosts. What the operator has is in `made`; each host reads its own copy of
    its folder, in `etc`, as a real host does.
    """

    def __init__(self, folder: Path, *hosts: str, options: tuple[str, ...] = ()) -> None:
        self.made, self.etc, self.data = folder / "made", folder / "etc", folder / "data"
        self.etc.mkdir()
        self.ports = free_port(), free_port()
        done = run_keylane(
            *("cluster", "init", str(self.made), "--data", str(self.data), "--output", "json"),
            *(f"--host={host}" for host in hosts),
            *("--meta-port", str(self.ports[0]), "--broker-port", str(self.ports[1])),
            *options,
        )
        assert done.returncode == 0, done.stderr
        self.token = json.loads(done.stdout)["admin_token"]
        for host in hosts:  # a disk of its own
            settings = self.made / host / "keylane.toml"
            settings.write_text(
                settings.read_text().replace(f"{self.data}/", f"{self.data}/{host}/")
            )
        self.programs: dict[tuple[str, str], ServerProcess] = {}
        self.deliver = folder / "deliver.py"
        self.copy(*hosts)
        for program in ("metaserver", "broker"):
            for host in hosts:
                if f"[{program}]" in (self.etc / host / "keylane.toml").read_text():
                    self.start(host, program)

    def copy(self, *hosts: str) -> None:
        """Copy the folders of hosts to them."""
        for host in hosts:
            shutil.copytree(self.made / host, self.etc / host, dirs_exist_ok=True)

    def start(self, host: str, program: str, *, waits: bool = True) -> None:
        config = self.etc / host / "keylane.toml"
        process = ServerProcess(f"keylane.{program}", ("--config", str(config)))
        self.programs[host, program] = process
        follows = "follow = true" in config.read_text() and program == "broker"
        if waits and not follows:
            assert json.loads(process.stdout.readline())["ready"]
        self._write_deliver()

    def reload(self, *hosts: str) -> None:
        for (host, _), process in self.programs.items():
            if host in hosts:
                process.send_signal(signal.SIGHUP)

    def _write_deliver(self) -> None:
        """The operator's own command, which copies a folder to its host and reloads programs."""
        pids: dict[str, list[int]] = {}
        for (host, _), process in self.programs.items():
            pids.setdefault(host.partition("/")[0], []).append(process.pid)
        self.deliver.write_text(
            "import os, shutil, signal, sys\n"
            "host, folder = sys.argv[1:]\n"
            f"shutil.copytree(folder, {str(self.etc)!r} + '/' + host, dirs_exist_ok=True)\n"
            f"[os.kill(pid, signal.SIGHUP) for pid in {pids!r}[host]]\n"
        )

    def end(self, host: str, program: str) -> None:
        process = self.programs.pop((host, program))
        process.terminate()
        assert process.wait(60) == 0
        process.stdout.close()
        self._write_deliver()

    def run(self, *arguments: str, delivered: bool = False) -> tuple[int, dict]:
        """Run `keylane cluster …` on the folder; returns its status and what it shows."""
        name, *others = arguments
        words = [*name.split(), str(self.made), *others, "--output", "json"]
        if delivered:
            words += ["--deliver", f"{sys.executable} {self.deliver}"]
        done = run_keylane("cluster", *words, environment=os.environ | self.environment)
        assert "Traceback" not in done.stderr
        return done.returncode, json.loads(done.stdout or done.stderr)

    @property
    def environment(self) -> dict[str, str]:
        return {"KEYLANE_TOKEN": self.token}

    @property
    def meta(self) -> str:
        """The addresses of all metaservers."""
        return ",".join(ClusterFolder.read(self.made).metaservers)

    @property
    def access(self) -> dict[str, Any]:
        """The arguments with which the operator's clients are let in."""
        return {"tls": TlsSettings(ca=str(self.made / "ca.pem")), "token": self.token}

    def admin(self) -> Admin:
        return Admin(self.meta, wait_s=30, **self.access)

    async def ready(self, brokers: int, subject: str = "") -> None:
        async with self.admin() as admin:
            await wait_for_brokers(admin, brokers)
            if subject:
                await admin.create_subject(subject, partitions=4)

    def served(self, host: str, program: str = "broker") -> x509.Certificate:
        """The certificate that a server shows."""
        port = {"metaserver": self.ports[0], "health": self.ports[1] + 1}.get(
            program, self.ports[1]
        )
        return x509.load_pem_x509_certificate(ssl.get_server_certificate((host, port)).encode())

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.made)): path.read_bytes()
            for path in self.made.rglob("*")
            if path.is_file()
        }

    def kill(self, host: str) -> None:
        """Kill a host's broker; its disk is lost too."""
        process = self.programs.pop((host, "broker"))
        process.kill()
        process.wait()
        process.stdout.close()
        self._write_deliver()
        (folder,) = (self.data / host).glob("broker-*")
        shutil.rmtree(folder)

    def stop(self) -> None:
        for process in reversed(self.programs.values()):
            process.terminate()
        for process in self.programs.values():
            process.wait(20)
            process.stdout.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[OperatedCluster]:
    operated = OperatedCluster(tmp_path, FIRST, SECOND)
    yield operated
    operated.stop()


@pytest.fixture(scope="module")
def idle(tmp_path_factory) -> OperatedCluster:
    """A folder whose servers do not run."""
    folder = tmp_path_factory.mktemp("idle")
    operated = OperatedCluster.__new__(OperatedCluster)
    operated.made, operated.token = folder / "made", ""
    done = run_keylane(
        *("cluster", "init", str(operated.made), "--output", "json"),
        *(f"--host={host}" for host in (FIRST, SECOND)),
    )
    operated.token = json.loads(done.stdout)["admin_token"]
    return operated


class SteadySender:
    """Sends a message after the other until the block ends; each has to be acked."""

    def __init__(self, cluster: OperatedCluster, subject: str) -> None:
        self._cluster, self._subject = cluster, subject
        self.sent = 0
        self._has_begun, self._is_over = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._send)

    def _send(self) -> None:
        try:
            with sync.Producer(self._cluster.meta, **self._cluster.access) as producer:
                while not self._is_over.is_set():
                    key = b"%d" % (self.sent % 20)
                    producer.send(self._subject, b"%d" % self.sent, key=key).result(60)
                    self.sent += 1
                    self._has_begun.set()
        except BaseException as error:  # noqa: BLE001 - raised at the end of the block
            self._failure = error
            self._has_begun.set()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._has_begun.wait(60)
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure


def problems(step: dict) -> list[str]:
    return [finding["problem"] for finding in step["left"]]


async def run(cluster: OperatedCluster, *arguments: str, delivered: bool = False):
    return await asyncio.to_thread(cluster.run, *arguments, delivered=delivered)


# ── growing and shrinking ─────────────────────────────────────────────────────────────────────────
async def test_host_joins_gets_partitions_and_leaves(cluster: OperatedCluster) -> None:
    await cluster.ready(2, "orders")
    status, step = await run(cluster, "add-host", THIRD)
    assert status == 1, step
    assert "it does not know the new token" in problems(step)
    assert "it has not been started yet" in problems(step)
    before = cluster.files()
    status, error = await run(cluster, "add-host", THIRD)
    assert (status, error["code"]) == (1, 1369)
    assert cluster.files() == before
    cluster.copy(FIRST, THIRD)
    cluster.reload(FIRST)
    cluster.start(THIRD, "broker")
    await cluster.ready(3)
    with SteadySender(cluster, "orders"):
        async with cluster.admin() as admin:
            await admin.wait(await admin.resize("orders", 6))
            parts = (await admin.describe_subject("orders")).partitions
            assert "g3" in {part.broker_group for part in parts}
        status, error = await run(cluster, "remove-host", THIRD)
        assert (status, error["name"]) == (1, "ConfigError")  # it asks first
        status, error = await run(cluster, "remove-host", THIRD, "--yes")
        assert (status, error["code"]) == (1, 1371)  # unread messages are there
    assert (cluster.made / THIRD).exists()
    async with cluster.admin() as admin:
        await admin.delete_subject("orders")
        await cluster.ready(3, "later")
        parts = (await admin.describe_subject("later")).partitions
        assert "g3" not in {part.broker_group for part in parts}, "it is cordoned"
    deadline_s = time.monotonic() + 60
    while True:
        status, step = await run(cluster, "remove-host", THIRD, "--yes")
        if "left" in step:
            break
        assert time.monotonic() < deadline_s, step
    assert (status, problems(step)) == (1, ["it still runs"])
    status, step = await run(cluster, "token rotate", THIRD, "--new")
    assert (status, problems(step)) == (1, ["it does not know the new token"]), step
    token = (cluster.made / THIRD / "broker.token").read_text().strip()
    cluster.end(THIRD, "broker")
    status, error = await run(cluster, "remove-host", THIRD, "--yes", "--deliver", "false")
    assert (status, error["name"]) == (1, "ConfigError"), "the metaserver does not hear of it"
    assert (cluster.made / THIRD).exists(), "so that the command can be repeated"
    status, step = await run(cluster, "remove-host", THIRD, "--yes", delivered=True)
    assert (status, problems(step)) == (0, []), step
    assert not list(cluster.made.glob(f"{THIRD}*"))
    assert "g3:" not in (cluster.etc / FIRST / "keylane.toml").read_text(), "nor its next token"
    assert token not in b"".join(cluster.files().values()).decode()
    status, error = await run(cluster, "remove-host", THIRD, "--yes")
    assert (status, error["code"]) == (1, 1370)


async def test_host_with_the_only_metaserver_stays(cluster: OperatedCluster) -> None:
    before = cluster.files()
    status, error = await run(cluster, "remove-host", FIRST, "--yes")
    assert (status, error["code"]) == (1, 1371)
    assert cluster.files() == before


async def test_host_without_a_copy_is_removed_once_its_loss_is_accepted(
    cluster: OperatedCluster,
) -> None:
    await cluster.ready(2, "orders")
    cluster.kill(SECOND)
    status, error = await run(cluster, "remove-host", SECOND, "--yes")
    assert (status, error["code"]) == (1, 1371)
    assert "--accept-loss" in error["message"]
    assert (cluster.made / SECOND).exists()
    async with cluster.admin() as admin:
        await wait_until(partial(one_is_silent, admin))
        for operation in (await admin.evacuate("g2", accept_loss=True)).operations:
            await admin.wait(operation)
    status, step = await run(cluster, "remove-host", SECOND, "--yes", delivered=True)
    assert (status, step["left"]) == (0, []), step
    assert not (cluster.made / SECOND).exists()
    with SteadySender(cluster, "orders"):
        pass


async def test_copy_on_another_host_takes_the_place_of_a_lost_one(
    cluster: OperatedCluster,
) -> None:
    """The host is lost with its disk, and nobody types a command."""
    settings = cluster.etc / SECOND / "keylane.toml"
    for path in (settings, cluster.made / SECOND / "keylane.toml"):
        path.write_text(path.read_text().replace("[broker]\n", "[broker]\nfailover = true\n"))
    cluster.end(SECOND, "broker")
    cluster.start(SECOND, "broker")
    await cluster.ready(2, "orders")
    status, step = await run(
        cluster,
        "add-host",
        THIRD,
        "--copy-of",
        "g2",
        "--data",
        str(cluster.data / "third"),
        delivered=True,
    )
    assert status == 1
    assert "it does not know the new token" not in problems(step)
    before = cluster.files()
    status, error = await run(cluster, "remove-host", SECOND, "--yes")
    assert (status, error["code"]) == (1, 1371), "the copy has nothing yet"
    assert cluster.files() == before
    cluster.copy(THIRD)
    cluster.start(THIRD, "broker")
    async with cluster.admin() as admin:
        await admin.set_copies("g2", 2, may_share_machine=True)
        async with asyncio.timeout(60):
            while (
                next(
                    each
                    for each in (await admin.list_brokers()).brokers
                    if each.broker_group == "g2"
                ).folders
                < 2
            ):
                await asyncio.sleep(0.1)
        with SteadySender(cluster, "orders"):
            cluster.kill(SECOND)
            async with asyncio.timeout(60):
                while not any(
                    each.available and each.address.startswith(THIRD)
                    for each in (await admin.list_brokers()).brokers
                ):
                    await asyncio.sleep(0.1)
    status, step = await run(cluster, "remove-host", SECOND, "--yes", delivered=True)
    assert (status, problems(step)) == (0, []), step


@pytest.fixture
def grouped(tmp_path: Path) -> Iterator[OperatedCluster]:
    """Three hosts with one broker group, as the pods of a StatefulSet."""
    operated = OperatedCluster(tmp_path, FIRST, SECOND, THIRD, options=("--one-group",))
    yield operated
    operated.stop()


async def health(cluster: OperatedCluster, host: str, port: int = 0) -> Health | None:
    """What a host's broker says of itself at its health port; None if it does not answer."""
    network = HttpNetwork(cluster.access["tls"])
    address = f"{host}:{port or cluster.ports[1] + 1}"
    try:
        return await fetch_health(network, address)
    except KeylaneError:
        return None
    finally:
        await network.close()


async def one_is_silent(admin: Admin) -> bool:
    return any(not each.available for each in (await admin.list_brokers()).brokers)


async def wait_until(condition) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.1)


async def test_group_of_hosts_serves_on_when_any_of_them_is_lost(grouped) -> None:
    """Each host answers probes in every state. A host that comes back with an empty disk, even the
    first broker's, is a copy again.
    """

    async def complete(*hosts: str) -> bool:
        found = [await health(grouped, host) for host in hosts]
        return all(each is not None and each.ready for each in found)

    await grouped.ready(1)
    async with grouped.admin() as admin:
        await admin.set_copies("g1", 2, may_share_machine=True)
        await admin.create_subject("orders", partitions=4)
        await wait_until(partial(complete, FIRST, SECOND, THIRD))
        follower = await health(grouped, SECOND)
        assert follower is not None
        assert follower.details["follows"]

        async def has_copies() -> bool:
            (group,) = (await admin.list_brokers()).brokers
            return group.available and group.folders == 2

        lost = FIRST
        with SteadySender(grouped, "orders"):
            for _ in range(2):
                await wait_until(has_copies)
                (group,) = (await admin.list_brokers()).brokers
                lost = group.address.partition(":")[0]
                grouped.kill(lost)

                async def is_replaced(gone: str = lost) -> bool:
                    (group,) = (await admin.list_brokers()).brokers
                    return group.available and not group.address.startswith(gone)

                await wait_until(is_replaced)
                if lost == FIRST:  # it made the group, and is a host as the others from now on
                    settings = grouped.etc / FIRST / "keylane.toml"
                    text = settings.read_text()
                    settings.write_text(text.replace("follow = false", "follow = true"))
                grouped.start(lost, "broker", waits=False)
                await wait_until(partial(complete, lost))
                again = await health(grouped, lost)
                assert again is not None
                assert again.details["follows"]
    old = grouped.served(lost, "health")
    status, step = await run(grouped, "cert renew", "--all", delivered=True)
    assert (status, step["left"]) == (0, []), step
    assert grouped.served(lost, "health") != old, "a follower takes its new certificate, too"
    status, step = await run(grouped, "add-host", "127.0.0.4", delivered=True)
    assert (status, problems(step)) == (1, ["it has not been started yet"]), step
    settings = broker_settings({}, grouped.made / "127.0.0.4" / "keylane.toml")
    assert (settings.group, settings.follow) == ("g2", False), "it makes a group of its own"


# ── moving, and losing the database ───────────────────────────────────────────────────────────────
async def test_cluster_moves_to_other_hosts_without_an_error(tmp_path, postgres) -> None:
    """Each host has a metaserver and a broker. A third one takes the place of the first."""
    options = ("--postgresql", postgres.url())
    cluster = OperatedCluster(tmp_path, FIRST, SECOND, options=options)
    try:
        await cluster.ready(2, "orders")
        status, step = await run(cluster, "add-host", THIRD, "--metaserver", delivered=True)
        assert (status, set(problems(step))) == (1, {"it has not been started yet"}), step
        assert len(step["left"]) == 2
        cluster.copy(FIRST, SECOND, THIRD)
        cluster.start(THIRD, "metaserver")
        cluster.start(THIRD, "broker")
        await cluster.ready(3)
        with SteadySender(cluster, "orders"):
            for host in (FIRST, SECOND):  # so that they know the new metaserver
                cluster.end(host, "broker")
                cluster.start(host, "broker")
                await cluster.ready(3)
        async with cluster.admin() as admin:
            await admin.delete_subject("orders")
            await wait_until(lambda: _is_empty(admin))
        status, step = await run(cluster, "remove-host", FIRST, "--yes")
        assert (status, set(problems(step))) == (1, {"it still runs"}), step
        for program in ("broker", "metaserver"):
            cluster.end(FIRST, program)
        status, step = await run(cluster, "remove-host", FIRST, "--yes", delivered=True)
        assert (status, step["left"]) == (0, []), step
        assert FIRST not in (cluster.made / SECOND / "keylane.toml").read_text()
        for host in (SECOND, THIRD):
            cluster.copy(host)
            cluster.end(host, "broker")
            cluster.start(host, "broker")
        await cluster.ready(2, "later")
        with SteadySender(cluster, "later"):
            pass
    finally:
        cluster.stop()


async def _is_empty(admin: Admin) -> bool:
    return not await admin.list_subjects()


def test_second_metaserver_needs_a_database_that_both_share(idle: OperatedCluster) -> None:
    before = idle.files()
    status, error = idle.run("add-host", THIRD, "--metaserver")
    assert (status, error["code"]) == (1, 1001)
    assert "PostgreSQL" in error["message"]
    assert idle.files() == before


async def test_lost_database_is_restored_or_rebuilt_with_all_rights(
    cluster: OperatedCluster, tmp_path: Path
) -> None:
    """The disk of the metaserver's host is lost; brokers have all messages."""
    await cluster.ready(2, "orders")
    environment = os.environ | cluster.environment
    environment |= {"KEYLANE_TLS_CA": str(cluster.made / "ca.pem"), "KEYLANE_META": cluster.meta}
    data = cluster.data / FIRST / "metaserver-1"
    backup = str(tmp_path / "backup.jsonl")

    def keylane(*words: str) -> None:
        done = run_keylane(*words, environment=environment)
        assert done.returncode == 0, done.stderr

    await asyncio.to_thread(keylane, "access", "grant", "shop", "produce")
    await asyncio.to_thread(keylane, "meta", "backup", backup, "--data", str(data))
    brokers = [f"--broker={host}:{cluster.ports[1]}" for host in (FIRST, SECOND)]
    for words in (
        ["restore", backup, "--data", str(data)],
        ["rebuild", "--data", str(data), *brokers, "--access-from", backup],
    ):
        with SteadySender(cluster, "orders"):
            cluster.end(FIRST, "metaserver")
            shutil.rmtree(data)
            await asyncio.to_thread(keylane, "meta", *words)
            cluster.start(FIRST, "metaserver")
        await cluster.ready(2)
        async with cluster.admin() as admin:
            assert {row.principal for row in (await admin.list_grants()).grants} >= {"shop"}
            assert [each.subject for each in await admin.list_subjects()] == ["orders"]


# ── certificates ──────────────────────────────────────────────────────────────────────────────────
async def test_certificate_is_renewed_when_it_is_due(cluster: OperatedCluster) -> None:
    await cluster.ready(2, "orders")
    before = cluster.files()
    status, step = await run(cluster, "cert renew")
    assert (status, step["left"]) == (0, [])
    assert cluster.files() == before, "none is due"
    old = cluster.served(SECOND)
    with SteadySender(cluster, "orders"):
        status, step = await run(cluster, "cert renew", SECOND, "--all")
        assert (status, len(step["left"])) == (1, 1), step
        assert "another certificate" in problems(step)[0]
        assert "systemctl reload" in step["left"][0]["advice"]
        assert cluster.served(SECOND) == old
        status, step = await run(cluster, "cert renew", delivered=True)
        assert (status, step["left"]) == (0, []), step
    new = cluster.served(SECOND)
    assert new == x509.load_pem_x509_certificate(
        (cluster.made / SECOND / "server.pem").read_bytes()
    )
    assert new.serial_number != old.serial_number
    assert new.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ) == old.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    checked = run_keylane(
        *("cluster", "check", "--meta", cluster.meta, "--folder", str(cluster.made), "-o", "json"),
        environment=os.environ
        | cluster.environment
        | {"KEYLANE_TLS_CA": str(cluster.made / "ca.pem")},
    )
    found = [each["problem"] for each in json.loads(checked.stdout)["findings"]]
    assert not [text for text in found if "of its disk is free" not in text]


async def test_certificate_that_ends_soon_or_has_another_key_is_renewed(
    cluster: OperatedCluster,
) -> None:
    """As after a crash between its two files."""
    authority = CertificateAuthority.load(
        cluster.made / "ca.pem", cluster.made / "ca.key", dt.datetime.now(dt.UTC)
    )
    short = authority.issue([FIRST, "localhost"], days=10)
    (cluster.made / FIRST / "server.pem").write_bytes(short.certificate)
    (cluster.made / FIRST / "server.key").write_bytes(short.key)
    named = authority.issue([SECOND, "localhost", "b.example"])
    (cluster.made / SECOND / "server.pem").write_bytes(named.certificate)
    (cluster.made / SECOND / "server.key").write_bytes(short.key)
    status, step = await run(cluster, "cert renew", delivered=True)
    assert (status, step["left"]) == (0, []), step
    assert [line.partition(":")[0] for line in step["done"]] == [FIRST, SECOND]
    assert "b.example" in names_of(cluster.served(SECOND)), "it keeps the names of the old one"


async def test_authority_is_replaced_in_three_steps_under_load(cluster: OperatedCluster) -> None:
    await cluster.ready(2, "orders")
    old = (cluster.made / "ca.pem").read_bytes()
    others = CertificateAuthority.create("others", dt.datetime.now(dt.UTC)).pair.certificate
    for path in (cluster.made, cluster.made / FIRST, cluster.made / SECOND):
        (path / "ca.pem").write_bytes(old + others)
    before = cluster.files()
    status, step = await run(cluster, "ca rotate", delivered=True)
    assert (status, step["left"]) == (0, [])
    assert cluster.files() == before, "nothing begins without --new"
    with SteadySender(cluster, "orders"):
        status, step = await run(cluster, "ca rotate", "--new")
        assert status == 1
        assert step["done"][0].startswith("step 1 of 3")
        assert (cluster.made / "ca.pem").read_bytes().startswith(old)
        before = cluster.files()
        status, error = await run(cluster, "ca rotate", "--yes")
        assert (status, error["code"]) == (1, 1372), "no server trusts the new one yet"
        assert cluster.files() == before
        status, step = await run(cluster, "ca rotate", delivered=True)
        assert (status, len(step["left"])) == (1, 1), step
        assert "clients need" in problems(step)[0]
        assert cluster.files() == before
        status, step = await run(cluster, "ca rotate", "--yes")
        assert status == 1
        assert step["done"][0].startswith("step 2 of 3")
        assert len(step["left"]) == 3
        before = cluster.files()
        status, error = await run(cluster, "ca rotate", "--yes")
        assert (status, error["code"]) == (1, 1372), "certificates of the old one are in use"
        assert cluster.files() == before
        status, step = await run(cluster, "ca rotate", "--yes", delivered=True)
        assert (status, step["left"]) == (0, []), step
        assert step["done"][-1].startswith("step 3 of 3")
    new = (cluster.made / "ca.pem").read_bytes()
    assert old not in new
    kept, authority = x509.load_pem_x509_certificates(new)
    assert kept == x509.load_pem_x509_certificate(others)
    for host, program in ((FIRST, "metaserver"), (FIRST, "broker"), (SECOND, "broker")):
        cluster.served(host, program).verify_directly_issued_by(authority)
    status, step = await run(cluster, "ca rotate", "--yes")
    assert (status, step["left"]) == (0, [])
    assert (cluster.made / "ca.pem").read_bytes() == new


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────
async def test_token_of_a_broker_is_replaced_under_load(cluster: OperatedCluster) -> None:
    await cluster.ready(2, "orders")
    old = (cluster.made / SECOND / "broker.token").read_text()
    with SteadySender(cluster, "orders"):
        status, step = await run(cluster, "token rotate", SECOND, "--new")
        assert (status, problems(step)) == (1, ["it does not know the new token"])
        assert (cluster.made / SECOND / "broker.token").read_text() == old
        status, step = await run(cluster, "token rotate", delivered=True)
        assert (status, step["left"]) == (0, []), step
    assert (cluster.made / SECOND / "broker.token").read_text() != old
    assert not list(cluster.made.glob("*.token"))
    settings = (cluster.made / FIRST / "keylane.toml").read_text()
    assert settings.count("g2:") == 1
    async with Admin(cluster.meta, **cluster.access | {"token": old.strip()}) as admin:
        with pytest.raises(UnauthenticatedError):
            await admin.list_subjects()
    await cluster.ready(2)
    status, step = await run(cluster, "token rotate")
    assert (status, step["done"]) == (0, ["no token is being replaced; --new replaces them"])


async def test_token_of_the_administrator_is_replaced_without_a_restart(
    cluster: OperatedCluster,
) -> None:
    await cluster.ready(2)
    old = cluster.token
    async with cluster.admin() as admin:
        cluster.token = (await admin.create_token("admin")).token
    settings = cluster.etc / FIRST / "keylane.toml"
    text = settings.read_text()
    assert token_hash(old) in text
    settings.write_text(text.replace(token_hash(old), token_hash(cluster.token)))
    cluster.reload(FIRST)

    async def is_refused() -> bool:
        async with Admin(cluster.meta, **cluster.access | {"token": old}) as admin:
            try:
                await admin.list_subjects()
            except UnauthenticatedError:
                return True
        return False

    await wait_until(is_refused)
    async with cluster.admin() as admin:
        await admin.list_grants()


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "command",
    ["remove-host nobody", "cert renew nobody", "token rotate nobody --new"],
)
def test_unknown_host_changes_nothing(idle: OperatedCluster, command: str) -> None:
    *words, host = (word for word in command.split() if word != "--new")
    new = ["--new"] if "--new" in command else []
    before = idle.files()
    status, error = idle.run(" ".join(words), host, *new)
    assert (status, error["code"]) == (1, 1370)
    assert FIRST in error["message"]
    assert idle.files() == before


BROKEN = {
    "unreadable": (b"no key", 1343),
    "of another authority": (
        CertificateAuthority.create("another", dt.datetime.now(dt.UTC)).pair.key,
        1344,
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("command", [("cert renew",), ("add-host", THIRD), ("ca rotate",)])
def test_key_of_the_authority_that_cannot_be_used_changes_nothing(
    idle: OperatedCluster, tmp_path: Path, kind: str, command: tuple[str, ...]
) -> None:
    content, code = BROKEN[kind]
    key = idle.made / "ca.key"
    kept = key.read_bytes()
    key.write_bytes(content)
    before = idle.files()
    try:
        status, error = idle.run(*command)
        assert (status, error["code"]) == (1, code)
        assert "ca.key" in error["message"]
        assert idle.files() == before
    finally:
        key.write_bytes(kept)


@pytest.mark.parametrize("command", [("cert renew",), ("add-host", THIRD), ("ca rotate",)])
def test_authority_that_has_expired_changes_nothing(
    idle: OperatedCluster, command: tuple[str, ...]
) -> None:
    kept = {name: (idle.made / name).read_bytes() for name in ("ca.pem", "ca.key")}
    past = dt.datetime.now(dt.UTC) - dt.timedelta(days=4000)
    pair = CertificateAuthority.create("past", past).pair
    (idle.made / "ca.pem").write_bytes(pair.certificate)
    (idle.made / "ca.key").write_bytes(pair.key)
    before = idle.files()
    try:
        status, error = idle.run(*command)
        assert (status, error["code"]) == (1, 1343)
        assert "expired on" in error["message"]
        assert idle.files() == before
    finally:
        for name, content in kept.items():
            (idle.made / name).write_bytes(content)


def test_folder_that_is_not_of_a_cluster_is_refused(tmp_path: Path) -> None:
    done = run_keylane("cluster", "cert", "renew", str(tmp_path))
    assert done.returncode == 1
    assert "ConfigError 1349" in done.stderr


def test_host_that_cannot_be_reached_changes_nothing(idle: OperatedCluster) -> None:
    """A new host needs a name that no broker group ever had, which metaservers know."""
    before = idle.files()
    status, error = idle.run("add-host", THIRD)
    assert status == 1
    assert "cannot reach" in error["message"]
    assert idle.files() == before
