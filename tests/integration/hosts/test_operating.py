"""What supervisors and operators see of real programs: metrics, health, settings, SIGHUP."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from keylane import Backoff, Consumer, ConsumerSettings, Message, Producer, metrics
from keylane.protocol.control import Join, Joined
from keylane.protocol.endpoints import JOIN
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, Program, eventually
from support.prometheus import promtool
from support.server_process import ServerProcess, run_keylane

SUBJECT = "operated"
SETTINGS = ConsumerSettings(handler_backoff=Backoff(first_ms=10, max_ms=10))


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples_of(address: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    status, text = get(address, "/metrics")
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples, name: str) -> float:
    return sum(value for (given, _), value in samples.items() if given == name)


async def test_metrics_tell_traffic_lag_and_refusals(file_cluster: Cluster) -> None:
    """What was sent, handed out and not acked adds up over the brokers; keys are in no label."""
    await file_cluster.create(SUBJECT, partitions=4)
    async with Producer(file_cluster.meta) as producer:
        for number in range(1_000):
            producer.send(SUBJECT, b"value", key=b"secret-%d" % (number % 50))
        await producer.flush()
    taken = 0
    async with Consumer(file_cluster.meta, subject=SUBJECT, group="billing") as consumer:
        async for message in consumer:
            await message.ack()
            taken += 1
            if taken == 600:
                break
    brokers = [broker.address for broker in file_cluster.brokers]
    behind = [samples_of(address) for address in brokers]
    stored = ("keylane_broker_stored_messages_total", (("subject", SUBJECT),))
    lag = ("keylane_group_lag_messages", (("group", "billing"), ("subject", SUBJECT)))
    age = ("keylane_group_lag_seconds", (("group", "billing"), ("subject", SUBJECT)))
    assert sum(samples.get(stored, 0) for samples in behind) == 1_000
    assert sum(samples.get(lag, 0) for samples in behind) == 400
    assert max(samples.get(age, 0) for samples in behind) > 0
    assert sum(total(samples, "keylane_broker_commit_seconds_count") for samples in behind) > 0
    assert not any("secret" in get(address, "/metrics")[1] for address in brokers)

    assert get(file_cluster.meta, "/v1/subjects/none/route")[0] == 404
    cluster = samples_of(file_cluster.meta)
    assert total(cluster, "keylane_metaserver_broker_available") == len(brokers)
    assert total(cluster, "keylane_refusals_total") >= 1


async def test_metrics_time_messages_from_send_to_ack(file_cluster: Cluster) -> None:
    """And each kind of request; a group that fails a try has it counted; offsets add up."""
    await file_cluster.create("timed", partitions=1)
    tries = 0

    async def handle(message: Message) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("not yet")

    registry = CollectorRegistry()
    collector = metrics.register(registry)
    async with Producer(file_cluster.meta) as producer:
        for _ in range(10):
            await producer.send("timed", b"value", key=b"a")
    names = {"subject": "timed", "group": "slow"}
    async with Consumer(file_cluster.meta, handler=handle, settings=SETTINGS, **names):

        def samples() -> dict[str, float]:
            return {
                name: value
                for broker in file_cluster.brokers
                for (name, labels), value in samples_of(broker.address).items()
                if dict(labels).get("subject") == "timed"
            }

        await eventually(lambda: samples().get("keylane_group_lag_messages") == 0)
        value_of = registry.get_sample_value
        assert value_of("keylane_consumer_partitions", names) == 1
        await eventually(lambda: value_of("keylane_consumer_lag_messages", names) == 0)
    found = samples()
    assert found["keylane_group_latency_seconds_count"] >= 1
    assert 0 < found["keylane_group_latency_seconds_sum"] < 60
    assert found["keylane_group_failed_tries_total"] == 1
    assert found["keylane_subject_end_offset"] == found["keylane_subject_messages"] == 10
    assert found["keylane_subject_oldest_message_seconds"] > 0
    kinds = {
        dict(labels)["kind"]
        for broker in file_cluster.brokers
        for (name, labels), value in samples_of(broker.address).items()
        if name == "keylane_broker_request_seconds_count" and value > 0
    }
    assert kinds >= {"append", "acquire", "pull", "ack", "release"}
    assert value_of("keylane_consumer_received_messages_total", names) == 10
    assert value_of("keylane_consumer_failed_tries_total", names) == 1
    assert value_of("keylane_consumer_handler_seconds_count", names) == 11
    assert 0 < value_of("keylane_consumer_handler_seconds_sum", names) < 60
    assert value_of("keylane_consumer_partitions", names) == 0
    assert value_of("keylane_producer_acked_messages_total") >= 10
    assert value_of("keylane_producer_ack_seconds_count") >= 10
    assert value_of("keylane_producer_waiting_messages") == 0
    text = generate_latest(registry).decode()
    assert promtool("check", "metrics", text=text) == ""
    registry.unregister(collector)


async def test_metaserver_counts_hand_overs_and_what_silent_consumers_lose(
    file_cluster: Cluster,
) -> None:
    """A second consumer gets partitions from the first; one that never sends a heartbeat loses
    them.
    """
    await file_cluster.create("counted", partitions=2)
    names = {"subject": "counted", "group": "g"}

    def figure(name: str) -> float:
        return total(samples_of(file_cluster.meta), f"keylane_metaserver_{name}_total")

    before = {name: figure(name) for name in ("hand_overs", "expired_sessions", "lost_leases")}
    async with Consumer(file_cluster.meta, **names) as first:
        await eventually(lambda: len(first.assignment) == 2)
        async with Consumer(file_cluster.meta, **names) as second:
            await eventually(lambda: len(second.assignment) == 1)
            assert figure("hand_overs") - before["hand_overs"] == 1
    assert figure("expired_sessions") == before["expired_sessions"]
    joined = await join_without_heartbeats(file_cluster.meta, **names, ttl_ms=1_000)
    await eventually(lambda: figure("expired_sessions") > before["expired_sessions"])
    assert figure("lost_leases") - before["lost_leases"] == len(joined.grants.grants) == 2
    transactions = {
        dict(labels)["kind"]: value
        for (name, labels), value in samples_of(file_cluster.meta).items()
        if name == "keylane_metaserver_database_seconds_count"
    }
    assert min(transactions[kind] for kind in ("read", "write", "renew")) > 0


async def join_without_heartbeats(meta: str, *, subject: str, group: str, ttl_ms: int) -> Joined:
    """Join a group as a process that dies at once."""
    network = HttpNetwork()
    try:
        join = Join(session="a" * 32, subject=subject, group=group, ttl_ms=ttl_ms)
        return await MetaClient(network, [meta]).call(JOIN, join)
    finally:
        await network.close()


def test_health_is_not_ready_before_a_broker_is_registered(tmp_path: Path) -> None:
    """It lives, and takes no clients yet; the reason is in the answer."""
    broker = Program(
        *("keylane.broker", "--group", "g1", "--data", str(tmp_path / "b")),
        *("--meta", "127.0.0.1:1"),
    ).ready()
    try:
        assert get(broker.address, "/health/live") == (200, "{}")
        status, body = get(broker.address, "/health/ready")
        assert status == 503
        assert "not registered" in json.loads(body)["reason"]
    finally:
        broker.stop()


def test_health_is_ready_when_a_broker_is_registered(file_cluster: Cluster) -> None:
    """So are metaservers whose database can be written."""
    for address in (file_cluster.meta, file_cluster.brokers[0].address):
        assert get(address, "/health/live")[0] == 200
        status, body = get(address, "/health/ready")
        assert status == 200, body


BROKER_SERIES = {
    "keylane_broker_stored_messages_total",
    "keylane_broker_stored_bytes_total",
    "keylane_broker_handed_messages_total",
    "keylane_broker_handed_bytes_total",
    "keylane_broker_request_seconds_bucket",
    "keylane_broker_commit_seconds_bucket",
    "keylane_group_lag_messages",
    "keylane_group_lag_seconds",
    "keylane_broker_waiting_pulls",
    "keylane_broker_queued_bytes",
    "keylane_broker_pull_locks",
    "keylane_broker_fences_total",
    "keylane_broker_disk_free_bytes",
    "keylane_broker_disk_bytes",
}
METASERVER_SERIES = {
    "keylane_metaserver_leases",
    "keylane_metaserver_broker_available",
    "keylane_group_sessions",
    "keylane_metaserver_subjects",
    "keylane_metaserver_groups",
    "keylane_metaserver_operations",
}
SERIES = {
    "keylane_refusals_total",
    "keylane_event_loop_delay_seconds_bucket",
    "keylane_connections",
    "keylane_build_info",
    "keylane_access_off",
    "keylane_insecure_network",
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
    "process_open_fds",
}


async def test_metrics_have_every_series_that_operators_need(file_cluster: Cluster) -> None:
    """Of traffic, disk, groups, leases, refusals and the process, once there is something to
    tell.
    """
    await file_cluster.create("series", partitions=4)
    async with Producer(file_cluster.meta) as producer:
        for number in range(200):
            producer.send("series", b"value", key=b"%d" % number)
        await producer.flush()
    async with Consumer(file_cluster.meta, subject="series", group="g") as consumer:
        await (await anext(aiter(consumer))).ack()
        addresses = [file_cluster.meta, *(broker.address for broker in file_cluster.brokers)]
        for address in addresses:
            assert get(address, "/v1/none")[0] == 404
        meta, *brokers = [{name for name, _ in samples_of(address)} for address in addresses]
    assert not (SERIES | METASERVER_SERIES) - meta
    assert not (SERIES | BROKER_SERIES) - set().union(*brokers)


def test_metaserver_reloads_its_file_at_sighup(tmp_path: Path) -> None:
    """The log level is taken over; what needs a restart is named; the log is JSON lines."""
    config, log = tmp_path / "host.toml", tmp_path / "log"
    table = f'[metaserver]\ndata = "{tmp_path / "m"}"\nport = 0\n'
    config.write_text(table + 'log_level = "ERROR"\n')
    with log.open("wb") as stderr:
        arguments = ("metaserver", "run", "--config", str(config))
        process = ServerProcess("keylane.cli", arguments, errors=stderr.fileno())
        try:
            assert json.loads(process.stdout.readline())["ready"]
            config.write_text(table + 'log_level = "INFO"\ncluster = "north"\n')
            process.send_signal(signal.SIGHUP)
            for _ in range(600):
                if "need a restart" in log.read_text():
                    break
                time.sleep(0.05)
            told = [json.loads(line) for line in log.read_text().splitlines()]
        finally:
            process.terminate()
            process.wait(60)
            process.stdout.close()
    messages = [line["message"] for line in told]
    assert "settings reloaded: log_level" in messages
    assert "these settings need a restart: cluster" in messages
    assert {line["program"] for line in told} == {"metaserver"}


async def test_broker_reloads_its_file_at_sighup(tmp_path: Path) -> None:
    """Retention and log level are taken over; a mistake changes nothing; the log is JSON lines."""
    config, log = tmp_path / "host.toml", tmp_path / "log"
    table = f'[broker]\ngroup = "g1"\ndata = "{tmp_path / "b"}"\nmeta = "127.0.0.1:1"\n'
    config.write_text(table)
    with log.open("wb") as stderr:
        arguments = ("broker", "run", "--config", str(config))
        process = ServerProcess("keylane.cli", arguments, errors=stderr.fileno())
        try:
            assert json.loads(process.stdout.readline())["ready"]

            def told(text: str) -> bool:
                lines = [json.loads(line) for line in log.read_text().splitlines()]
                assert all(line["broker_group"] == "g1" for line in lines)
                return any(text in line["message"] for line in lines)

            config.write_text(table + "retention_ms = 60000\nport = 1\n")
            process.send_signal(signal.SIGHUP)
            await eventually(lambda: told("settings reloaded: retention_ms"), what="the reload")
            await eventually(lambda: told("need a restart: port"), what="the other one")
            config.write_text(table + "retention_ms = -1\n")
            process.send_signal(signal.SIGHUP)
            await eventually(lambda: told("cannot reload the settings"), what="the refusal")
            assert process.poll() is None
        finally:
            process.terminate()
            process.wait(60)
            process.stdout.close()


def show(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_keylane(
        "config", "show", *arguments, environment={"PATH": "/usr/bin:/bin", **environment}
    )


@pytest.mark.parametrize("output", ["table", "json"])
def test_config_show_tells_the_origin_of_each_setting(tmp_path: Path, output: str) -> None:
    """A flag, the environment, a file, a default."""
    config = tmp_path / "host.toml"
    config.write_text('[broker]\ngroup = "g1"\nport = 7001\n')
    shown = show(
        *("broker", "--origin", "--config", str(config), "-o", output, "--data", "d"),
        KEYLANE_BROKER_META="127.0.0.1:7000",
        COLUMNS="300",
    )
    assert shown.returncode == 0, shown.stderr
    if output == "json":
        told = json.loads(shown.stdout)
        assert told["port"] == {"value": 7001, "origin": f"file {config}"}
        assert told["data"] == {"value": "d", "origin": "flag --data"}
        assert told["index"]["origin"] == "default"
    else:
        assert "environment KEYLANE_BROKER_META" in shown.stdout


@pytest.mark.parametrize("output", ["table", "json"])
def test_config_show_tells_no_password_of_the_database(tmp_path: Path, output: str) -> None:
    """It is copied into tickets; whose it is and where the database is stays."""
    shown = show(
        *("metaserver", "-o", output, "--data", str(tmp_path)),
        KEYLANE_METASERVER_DATABASE_URL="postgresql+asyncpg://kl:secret@db/meta?password=secret",
        COLUMNS="300",
    )
    assert shown.returncode == 0, shown.stderr
    assert "secret" not in shown.stdout
    assert "postgresql+asyncpg://kl:***@db/meta?password=***" in shown.stdout


def test_metaserver_says_once_that_a_password_is_in_its_arguments(tmp_path: Path) -> None:
    url = "postgresql+asyncpg://kl:secret@127.0.0.1:1/meta"
    given = ("metaserver", "run", "--data", str(tmp_path), "--port", "0", "--log-format", "text")
    told = run_keylane(*given, "--database-url", url)
    assert told.returncode == 1
    assert told.stderr.count("every user of this host can see the password in --database-url") == 1
    assert "KEYLANE_METASERVER_DATABASE_URL" in told.stderr
    assert "secret" not in told.stderr
    silent = run_keylane(*given, environment={"KEYLANE_METASERVER_DATABASE_URL": url})
    assert silent.returncode == 1
    assert "--database-url" not in silent.stderr


def test_meta_command_takes_the_url_of_the_environment_when_nothing_else_is_given(
    tmp_path: Path,
) -> None:
    variable = {"KEYLANE_METASERVER_DATABASE_URL": f"sqlite+aiosqlite:///{tmp_path / 'named.db'}"}
    done = run_keylane("meta", "migrate", environment=variable)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "named.db").exists()
    done = run_keylane("meta", "migrate", "--data", str(tmp_path / "folder"), environment=variable)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "folder" / "meta.db").exists()


def test_config_show_tells_all_mistakes_at_once(tmp_path: Path) -> None:
    """Of the file, the environment and the flags; nothing is started."""
    config = tmp_path / "host.toml"
    config.write_text('[broker]\ngroup = "../x"\ncolour = "red"\n')
    shown = show(
        *("broker", "--config", str(config), "--port", "99999"), KEYLANE_BROKER_INDEX="paper"
    )
    assert shown.returncode == 1
    for mistake in ("group:", "colour: no such", "port must", "index must", "data is missing"):
        assert mistake in shown.stderr
    assert "Traceback" not in shown.stderr
    in_json = show("broker", "--config", str(config), "-o", "json")
    assert (in_json.returncode, json.loads(in_json.stderr)["name"]) == (1, "ConfigError")
