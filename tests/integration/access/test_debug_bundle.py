"""A debug bundle of real servers: it has their state, and nothing that a user has sent or hidden."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import stat
import tarfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from keylane import Consumer, Message, Producer
from keylane.cli.connection import wait_for_brokers
from keylane.errors import GroupUnknownError
from keylane.protocol.text import key_digest
from support.access.secured_cluster import SecuredCluster
from support.cluster import Cluster, pause, resume
from support.server_process import run_keylane

VALUE, KEY, PROPERTY, ERROR, PASSWORD = (
    f"recognisable-{each}" for each in ("value", "key", "property", "error", "password")
)
URL = f"postgresql+asyncpg://keylane:{PASSWORD}@127.0.0.1:1/keylane"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    cluster = SecuredCluster(tmp_path_factory.mktemp("secured"))
    yield cluster
    cluster.stop()


async def fill(secured: SecuredCluster) -> None:
    """Messages that are stored, parked and failing; their consumers end at the end."""

    async def fail(message: Message) -> None:
        raise ValueError(f"{ERROR} {message.value.decode()}")

    access = {"tls": secured.tls, "token": secured.admin_token}
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(secured.admin())
        await wait_for_brokers(admin, 1)
        await admin.create_subject("orders", partitions=2)
        producer = await stack.enter_async_context(Producer(secured.meta, **access))
        for number in range(20):
            properties = {"note": f"{PROPERTY}-{number}"}
            await producer.send(
                "orders", f"{VALUE}-{number}".encode(), key=f"{KEY}-{number}", properties=properties
            )
        for group, options in (
            ("parking", {"on_failure": "park", "tries_max": 1}),
            ("failing", {}),
        ):
            consumer = Consumer(
                secured.meta, subject="orders", group=group, handler=fail, **access, **options
            )
            running = asyncio.create_task(consumer.run())
            stack.push_async_callback(asyncio.wait, [running])
            stack.callback(running.cancel)

        async def is_done() -> bool:
            try:
                parking = await admin.describe_group("orders", "parking")
                failing = await admin.describe_group("orders", "failing")
            except GroupUnknownError:  # its consumer has not joined yet
                return False
            return sum(each.parked or 0 for each in parking.partitions) == 20 and any(
                each.failing for each in failing.partitions
            )

        async with asyncio.timeout(60):
            while not await is_done():
                await asyncio.sleep(0.1)


def test_bundle_has_the_state_of_every_server_and_no_value_key_or_secret(
    secured: SecuredCluster, tmp_path: Path
):
    asyncio.run(fill(secured))
    (tmp_path / "logs").mkdir()
    server = {
        "logger": "keylane.broker",
        "program": "broker",
        "message": f"taken {PASSWORD}",
        "error": VALUE,
    }
    (tmp_path / "logs" / "broker.log").write_text(f"{json.dumps(server)}\nplain {VALUE}\n")
    config = tmp_path / "servers.toml"
    token_file = tmp_path / "cluster.token"
    token_file.write_text("kl_" + "b" * 43)
    config.write_text(
        f'[metaserver]\ndata = "/x"\ndatabase_url = "{URL}"\nhost = "127.0.0.1"\n'
        f'cluster_token_file = "{token_file}"\nadmin_token_hash = "{"a" * 64}"\n'
    )
    (tmp_path / "admin.token").write_text(secured.admin_token)
    bundle = tmp_path / "bundle.tar.gz"
    environment = {
        "KEYLANE_TOKEN_FILE": str(tmp_path / "admin.token"),
        "KEYLANE_TOKEN": "kl_" + "c" * 43,
        "KEYLANE_METASERVER_DATABASE_URL": URL,
        "KEYLANE_TLS_CA": str(secured.tls.ca),
    }
    done = run_keylane(
        *("debug", "bundle", str(bundle), "--meta", secured.meta, "--config", str(config)),
        *("--logs", str(tmp_path / "logs")),
        environment=environment,
    )
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    everything = gzip.decompress(bundle.read_bytes()) + done.stdout.encode()
    hidden = [
        *(each.encode() for each in (VALUE, KEY, PROPERTY, ERROR, PASSWORD, secured.admin_token)),
        *(each.encode().hex().encode() for each in (KEY, VALUE)),
        *(b"kl_" + letter * 43 for letter in (b"b", b"c")),
        b"a" * 64,
    ]
    assert not [each for each in hidden if each in everything]
    assert "no values and no keys of messages" in done.stdout
    parts = read(bundle)
    assert parts["subjects/orders.json"]["subject"]["subject"] == "orders"
    groups = {each["group"]: each for each in parts["subjects/orders.json"]["groups"]}
    assert groups.keys() == {"parking", "failing"}
    (broker,) = (name for name in parts if name.endswith("partitions.json"))
    progress = [group for each in parts[broker]["partitions"] for group in each["groups"]]
    assert {each["failing"]["kind"] for each in progress if each["failing"]} == {"ValueError"}
    (parked,) = (parts[name] for name in parts if name.endswith("parked.json"))
    keys = [key for row in parked for key in row["keys"]]
    assert len(keys) == 20
    assert all(each["key"].startswith("salted key digest ") for each in keys)
    failing = {each["failing"]["key_digest"] for each in progress if each["failing"]}
    assert failing <= {each["key"] for each in keys}
    assert not [n for n in range(20) if key_digest(f"{KEY}-{n}".encode()).encode() in everything]
    settings = parts["settings/metaserver-servers.toml.json"]
    assert settings["database_url"]["value"].startswith("postgresql+asyncpg://keylane:***@")
    assert settings["admin_token_hash"]["value"] == "***"
    clocks = {
        each["program"]: each["clock_difference_s"] for each in parts["check.json"]["servers"]
    }
    assert clocks.keys() == {"metaserver", "broker"}
    assert all(abs(each) < 5 for each in clocks.values())
    assert "keylane_build_info" in parts[broker.replace("partitions.json", "metrics.txt")]
    assert parts["logs/broker.log"].count("taken") == 1
    assert [each["what"].partition(" of")[0] for each in parts["contents.json"]["missing"]] == [
        "1 line"
    ]


def read(bundle: Path) -> dict[str, object]:
    """The parts by name without the folder; those of JSON decoded."""
    with tarfile.open(bundle) as archive:
        texts = {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()
            for member in archive
        }
    return {
        name: json.loads(text) if name.endswith(".json") else text for name, text in texts.items()
    }


@pytest.mark.cluster(brokers=2)
def test_broker_that_hangs_costs_its_time_limit_and_is_named(cluster: Cluster, tmp_path: Path):
    asyncio.run(cluster.create("orders"))
    hanging = cluster.brokers[0]
    bundle = tmp_path / "bundle.tar.gz"
    hanging.process.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    done = run_keylane(
        *("debug", "bundle", str(bundle), "--meta", cluster.meta, "--timeout", "2"),
        *("--output", "json"),
    )
    took_s = time.monotonic() - began_s
    hanging.process.send_signal(signal.SIGCONT)
    assert done.returncode == 0, done.stderr
    assert took_s < 6
    written = json.loads(done.stdout)
    assert written["size_bytes"] == bundle.stat().st_size
    (missing,) = written["missing"]
    assert missing["what"] == f"broker {hanging.address}"
    assert missing["reason"] == "it was not complete after 2 s"
    folders = {name.split("/")[1] for name in read(bundle) if name.startswith("servers/")}
    assert len(folders) == 2
    assert "subjects/orders.json" in read(bundle)


@pytest.mark.cluster(brokers=1)
def test_bundle_says_that_it_lacks_copies_when_the_metaserver_hangs(
    cluster: Cluster, tmp_path: Path
):
    bundle = tmp_path / "bundle.tar.gz"
    pause(cluster.meta_program.process.pid)
    try:
        done = run_keylane("debug", "bundle", str(bundle), "--meta", cluster.meta, "--timeout", "2")
    finally:
        resume(cluster.meta_program.process.pid)
    assert done.returncode == 0, done.stderr
    parts = read(bundle)
    assert "copies.json" not in parts
    missing = {each["what"]: each["reason"] for each in parts["contents.json"]["missing"]}
    assert missing["the copies of broker groups"] == "the list of brokers is missing"
    assert missing["the list of brokers"]


def test_bundle_has_the_settings_of_both_servers_when_they_are_in_one_file(tmp_path: Path):
    bundle, config = tmp_path / "bundle.tar.gz", tmp_path / "servers.toml"
    other = tmp_path / "no.toml"
    other.write_text("[other]\n")
    config.write_text(
        '[broker]\ngroup = "g1"\ndata = "/x"\nmeta = "a:1"\n[metaserver]\ndata = "/y"\n'
    )
    done = run_keylane(
        *("debug", "bundle", str(bundle), "--meta", "127.0.0.1:1"),
        *("--config", str(config), "--config", str(other)),
    )
    assert done.returncode == 0, done.stderr
    parts = read(bundle)
    data = {
        program: parts[f"settings/{program}-servers.toml.json"]["data"]["value"]
        for program in ("broker", "metaserver")
    }
    assert data == {"broker": "/x", "metaserver": "/y"}
    missing = {each["what"] for each in parts["contents.json"]["missing"]}
    assert [each for each in missing if each.startswith("the settings")] == [
        f"the settings in {other}"
    ]


def test_bundle_names_servers_that_are_gone_and_replaces_no_file_unasked(tmp_path: Path):
    bundle = tmp_path / "bundle.tar.gz"
    config = tmp_path / "servers.toml"
    config.write_text(
        '[broker]\ngroup = "g1"\ndata = "/x"\nmeta = "a:1"\n[metaserver]\nport = 70000\n'
    )
    words = ("debug", "bundle", str(bundle), "--meta", "127.0.0.1:1", "--broker", "127.0.0.1:2")
    words += ("--config", str(config))
    done = run_keylane(*words)
    assert done.returncode == 0, done.stderr
    parts = read(bundle)
    missing = {each["what"] for each in parts["contents.json"]["missing"]}
    assert {"metaserver 127.0.0.1:1", "broker 127.0.0.1:2", "the list of brokers"} <= missing
    assert "settings/broker-servers.toml.json" in parts
    assert f"the settings of a metaserver in {config}" in missing
    assert f"keylane config show metaserver --config {config}" in done.stdout.replace("\n", "")
    before = bundle.read_bytes()
    refused = run_keylane(*words)
    assert refused.returncode == 1
    assert "exists: name another file, or pass --overwrite" in refused.stderr
    assert bundle.read_bytes() == before
    os.chmod(bundle, 0o644)
    assert run_keylane(*words, "--overwrite").returncode == 0
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    assert {each.name for each in tmp_path.iterdir()} == {"bundle.tar.gz", "servers.toml"}
