"""A cluster of three hosts, from what `keylane cluster init` writes: over TLS, with every client,
checked, renewed.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keylane import Admin, Consumer, Producer, Reader, TlsSettings, sync
from keylane.cli.commands.cluster.certificates import CertificateAuthority
from keylane.cli.connection import wait_for_brokers
from keylane.protocol.errors import ConfigError, Reason
from support.ports import free_port
from support.raising import raises
from support.server_process import ServerProcess, run_keylane

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
SUBJECT = "secured"


class HostedCluster:
    """The programs of three hosts; each host has an address of loopback."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        self.ports = free_port(), free_port()
        made = keylane(
            *("cluster", "init", str(folder), "--data", str(data), "--output", "json"),
            *(f"--host={host}" for host in HOSTS),
            *("--meta-port", str(self.ports[0]), "--broker-port", str(self.ports[1])),
        )
        assert made.returncode == 0, made.stderr
        self.told = json.loads(made.stdout)
        self.tls = TlsSettings(ca=self.told["ca"])
        self.token = self.told["admin_token"]
        self.meta = f"127.0.0.1:{self.ports[0]}"
        self.programs = [self._start("metaserver", HOSTS[0])]
        self.programs += [self._start("broker", host) for host in HOSTS]

    def _start(self, program: str, host: str) -> ServerProcess:
        config = self.folder / host / "keylane.toml"
        process = ServerProcess(f"keylane.{program}", ("--config", str(config)))
        assert json.loads(process.stdout.readline())["ready"]
        return process

    @property
    def environment(self) -> dict[str, str]:
        """Of commands and clients that take all from it."""
        return {
            "KEYLANE_TLS_CA": self.tls.ca,
            "KEYLANE_META": self.meta,
            "KEYLANE_TOKEN": self.token,
        }

    def stop(self) -> None:
        for process in reversed(self.programs):
            process.terminate()
        for process in self.programs:
            process.wait(20)
            process.stdout.close()


def keylane(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with these variables beside ours."""
    return run_keylane(*arguments, environment=os.environ | environment)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[HostedCluster]:
    folder = tmp_path_factory.mktemp("hosted")
    hosted = HostedCluster(folder / "made", folder / "data")
    yield hosted
    hosted.stop()


async def created(cluster: HostedCluster, subject: str) -> None:
    async with Admin(cluster.meta, tls=cluster.tls, token=cluster.token, wait_s=30) as admin:
        await wait_for_brokers(admin, len(HOSTS))
        await admin.create_subject(subject, partitions=6)


async def test_messages_pass_over_tls_through_three_hosts(cluster: HostedCluster) -> None:
    """Every broker has some; each key keeps its order."""
    await created(cluster, SUBJECT)
    sent = {b"key-%d" % key: [b"%d" % number for number in range(20)] for key in range(30)}
    async with Producer(cluster.meta, tls=cluster.tls, token=cluster.token) as producer:
        for number in range(20):
            for key in sent:
                producer.send(SUBJECT, b"%d" % number, key=key)
        await producer.flush()
    got: dict[bytes, list[bytes]] = {}
    async with Consumer(
        cluster.meta, subject=SUBJECT, group="g", tls=cluster.tls, token=cluster.token
    ) as consumer:
        async for message in consumer:
            got.setdefault(message.key, []).append(message.value)
            await message.ack()
            if sum(map(len, got.values())) == 600:
                break
    assert got == sent
    async with Admin(cluster.meta, tls=cluster.tls, token=cluster.token) as admin:
        route = await admin.describe_subject(SUBJECT)
        places = {part.address for part in route.partitions}
    assert places == {f"{host}:{cluster.ports[1]}" for host in HOSTS}


async def test_clients_take_the_authority_from_the_environment(
    cluster: HostedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await created(cluster, "ambient")
    monkeypatch.setenv("KEYLANE_TLS_CA", cluster.tls.ca)
    monkeypatch.setenv("KEYLANE_TOKEN", cluster.token)

    def send() -> None:
        with sync.Producer(cluster.meta) as producer:
            producer.send("ambient", b"value", key=b"k").result(30)

    await asyncio.to_thread(send)
    async with Reader(cluster.meta, "ambient") as reader:
        assert [message.value async for message in reader] == [b"value"]
    said = await asyncio.to_thread(
        lambda: keylane("produce", "ambient", "more", **cluster.environment)
    )
    assert said.returncode == 0, said.stderr


async def test_clients_are_told_what_tls_they_lack(cluster: HostedCluster, tmp_path: Path) -> None:
    with raises(Reason.TLS_NEEDED, match="requires TLS"):
        async with Admin(cluster.meta) as admin:
            await admin.health()
    other = tmp_path / "other.pem"
    now = dt.datetime.now(dt.UTC)
    other.write_bytes(CertificateAuthority.create("another", now).pair.certificate)
    with raises(Reason.CERTIFICATE_UNKNOWN):
        async with Admin(cluster.meta, tls=TlsSettings(ca=str(other))) as admin:
            await admin.health()
    with pytest.raises(ConfigError, match="TlsSettings"):
        Producer(cluster.meta, tls="ca.pem")


def test_init_writes_private_keys_for_their_owner_alone_and_refuses_a_used_folder(
    cluster: HostedCluster,
) -> None:
    files = sorted(path for path in cluster.folder.rglob("*") if path.is_file())
    secret = [path for path in files if path.suffix in {".key", ".toml"}]
    secret += cluster.folder.rglob("*.token")
    assert len(secret) == 1 + 3 * len(HOSTS)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secret)
    before = {path: path.read_bytes() for path in files}
    assert not any(cluster.token.encode() in content for content in before.values())
    again = keylane("cluster", "init", str(cluster.folder), "--host", "127.0.0.1")
    assert again.returncode == 1
    assert "ConfigError 1349" in again.stderr
    assert {path: path.read_bytes() for path in files} == before


def check(cluster: HostedCluster, **environment: str) -> tuple[int, dict]:
    done = keylane("cluster", "check", "--output", "json", **{**cluster.environment, **environment})
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


async def test_check_says_what_does_not_fit_and_a_signal_renews_a_certificate(
    cluster: HostedCluster,
) -> None:
    """A certificate that ends in ten days is told, until SIGHUP has the server take another."""
    await created(cluster, "checked")
    status, told = await asyncio.to_thread(check, cluster)
    kinds = {finding["problem"].partition(" of its disk")[2] for finding in told["findings"]}
    assert kinds <= {" is free"}, told["findings"]  # the disk of this machine may be full
    assert status == bool(told["findings"])
    assert len(told["servers"]) == 4
    assert all(
        host in told["servers"][number + 1]["certificate_names"]
        for number, host in enumerate(HOSTS)
    )
    assert all(abs(server["clock_difference_s"]) < 2 for server in told["servers"])

    authority = _authority_of(cluster)
    old = [(cluster.folder / HOSTS[1] / name).read_bytes() for name in ("server.pem", "server.key")]
    _put(cluster, authority(days=10))
    cluster.programs[2].send_signal(signal.SIGHUP)

    def is_told() -> bool:
        problems = [finding["problem"] for finding in check(cluster)[1]["findings"]]
        return any(text.startswith("its certificate ends in ") for text in problems)

    async with asyncio.timeout(60):
        while not await asyncio.to_thread(is_told):
            pass
    for name, content in zip(("server.pem", "server.key"), old, strict=True):
        (cluster.folder / HOSTS[1] / name).write_bytes(content)
    cluster.programs[2].send_signal(signal.SIGHUP)
    async with asyncio.timeout(60):
        while await asyncio.to_thread(is_told):
            pass


def _authority_of(cluster: HostedCluster):
    """Issue certificates for the second host by the cluster's own authority, whose key is in its
    folder.
    """
    authority = CertificateAuthority.load(
        cluster.folder / "ca.pem", cluster.folder / "ca.key", dt.datetime.now(dt.UTC)
    )
    return lambda **lifetime: authority.issue([HOSTS[1], "localhost"], **lifetime)


def _put(cluster: HostedCluster, pair) -> None:
    (cluster.folder / HOSTS[1] / "server.pem").write_bytes(pair.certificate)
    (cluster.folder / HOSTS[1] / "server.key").write_bytes(pair.key)


def test_check_says_which_servers_cannot_be_reached(cluster: HostedCluster) -> None:
    done = keylane(
        *("cluster", "check", "--output", "json"),
        **cluster.environment | {"KEYLANE_META": f"127.0.0.1:{free_port()}"},
    )
    assert done.returncode == 1
    (finding,) = json.loads(done.stdout)["findings"][:1]
    assert "cannot reach" in finding["problem"]
    assert finding["advice"]


@pytest.mark.parametrize("program", ["metaserver", "broker"])
def test_server_without_tls_is_refused_beyond_loopback(tmp_path: Path, program: str) -> None:
    """Unless that is written; then it says so."""
    needed = ("--data", str(tmp_path / "d"), "--port", str(free_port()))
    if program == "broker":
        needed += ("--group", "g", "--meta", "127.0.0.1:1")
    everywhere = ("--host", "0.0.0.0", "--advertised-host", "127.0.0.1")
    done = keylane(program, "run", *needed, *everywhere)
    assert done.returncode == 1
    assert "AddressError 1403" in done.stderr
    assert "insecure_network" in done.stderr
    done = keylane(program, "run", *needed, *everywhere, "--insecure-network", "true")
    assert done.returncode == 1
    assert 'access = "off"' in done.stderr
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            f"keylane.{program}",
            *needed,
            *everywhere,
            *("--insecure-network", "true", "--access", "off"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address = json.loads(process.stdout.readline())["address"]
    assert address.startswith("127.0.0.1:")
    if program == "metaserver":
        checked = keylane("cluster", "check", "--meta", address, "--output", "json")
        problems = [finding["problem"] for finding in json.loads(checked.stdout)["findings"]]
        assert any("insecure_network" in problem for problem in problems)
        assert any("access = off" in problem for problem in problems)
        lines = keylane("cluster", "check", "--meta", address).stdout.splitlines()
        assert "\\n" not in "".join(lines)
        at = next(number for number, line in enumerate(lines) if "access = off" in line)
        assert lines[at + 1].startswith("  "), "the advice is in a line of its own"
    process.terminate()
    told = process.communicate(timeout=20)[1]
    assert "insecure_network" in told
    assert "access = off" in told
