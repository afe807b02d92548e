"""A real Prometheus reads a cluster over TLS with a token, by the rules and the board of the
package.
"""

from __future__ import annotations

import re
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from keylane import Admin, Consumer, Producer
from keylane.cli.commands.observe.app import read_rules
from keylane.cli.commands.observe.board import build_board
from keylane.cli.connection import wait_for_brokers
from support.access.secured_cluster import SecuredCluster
from support.cluster import eventually
from support.prometheus import PrometheusServer, promtool, running_prometheus

SUBJECT, GROUP = "observed", "billing"
TOKEN = "kl_" + "m" * 43
CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}}
rule_files: [{rules}]
scrape_configs:
"""
JOB = """
  - job_name: {job}
    scheme: https
    authorization: {{credentials_file: {token}}}
    tls_config: {{ca_file: {ca}, server_name: localhost}}
    static_configs: [{{targets: ['{target}']}}]
"""
NAME = re.compile(r"\b(?:keylane|process)_[a-z_]+\b")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    folder = tmp_path_factory.mktemp("observed")
    token = folder / "metrics.token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    setting = f'metrics_token_file = "{token}"\n'
    cluster = SecuredCluster(folder, setting, setting)
    yield cluster
    cluster.stop()


@pytest.fixture
def prometheus(cluster: SecuredCluster, tmp_path: Path) -> Iterator[PrometheusServer]:
    rules, token = tmp_path / "keylane.rules.yml", tmp_path / "token"
    rules.write_text(read_rules())
    token.write_text(TOKEN)
    jobs = [
        JOB.format(job=job, token=token, ca=cluster.tls.ca, target=target)
        for job, target in (("control", cluster.meta), ("data", cluster.broker))
    ]
    with running_prometheus(CONFIG.format(rules=rules) + "".join(jobs)) as server:
        yield server


async def send_and_handle(cluster: SecuredCluster) -> None:
    """Let a group ack a message of several."""
    access = {"tls": cluster.tls, "token": cluster.admin_token}
    async with Admin(cluster.meta, wait_s=60, **access) as admin:
        await wait_for_brokers(admin, 1)
        await admin.create_subject(SUBJECT, partitions=1)
    async with Producer(cluster.meta, **access) as producer:
        for _ in range(5):
            await producer.send(SUBJECT, b"value", key=b"a")
    async with Consumer(cluster.meta, subject=SUBJECT, group=GROUP, **access) as consumer:
        await (await anext(aiter(consumer))).ack()


def exposition(cluster: SecuredCluster, address: str) -> str:
    """What a server tells a scraper with the token."""
    request = urllib.request.Request(
        f"https://{address}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    context = ssl.create_default_context(cafile=cluster.tls.ca)
    with urllib.request.urlopen(request, context=context, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def names_used() -> set[str]:
    """The metrics that the rules and the board name."""
    queries = [
        target["expr"] for panel in build_board()["panels"] for target in panel.get("targets", ())
    ]
    variables = [each.get("definition", "") for each in build_board()["templating"]["list"]]
    rules = re.sub(r"(?m)^#.*|runbook:.*|summary:.*", "", read_rules())
    return {*NAME.findall(" ".join([rules, *queries, *variables]))}


async def test_prometheus_reads_both_programs_and_evaluates_the_rules(
    cluster: SecuredCluster, prometheus: PrometheusServer
) -> None:
    """Every target is up, every rule is evaluated without an error, and the group's lag is there."""
    await send_and_handle(cluster)

    def targets() -> list[str]:
        found = prometheus.get("/api/v1/targets") or {"activeTargets": []}
        return [each["health"] for each in found["activeTargets"]]

    await eventually(lambda: targets() == ["up", "up"], what="scrapes over TLS with the token")
    lag = f'/api/v1/query?query=keylane_group_lag_messages{{group="{GROUP}"}}'.replace('"', "%22")

    def lags() -> list[str]:
        found = prometheus.get(lag) or {"result": []}
        return [each["value"][1] for each in found["result"]]

    await eventually(lambda: lags() == ["4"], what="the lag of the group")

    def health() -> set[str]:
        groups = (prometheus.get("/api/v1/rules") or {"groups": []})["groups"]
        return {rule["health"] for group in groups for rule in group["rules"]}

    await eventually(lambda: health() == {"ok"}, what="the evaluation of the rules")


async def test_metrics_follow_the_conventions_and_have_all_that_rules_and_board_name(
    cluster: SecuredCluster,
) -> None:
    """As promtool checks them."""
    texts = [exposition(cluster, address) for address in (cluster.meta, cluster.broker)]
    for text in texts:
        assert promtool("check", "metrics", text=text) == ""
    families = [family for text in texts for family in text_string_to_metric_families(text)]
    names = set()
    for family in families:
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        names |= {family.name + ending for ending in endings.get(family.type, ("",))}
    assert names_used() - names == set()


async def test_alerts_tell_a_server_that_ended_from_a_group_without_a_consumer(
    cluster: SecuredCluster, prometheus: PrometheusServer
) -> None:
    """Brokers and metaservers are scraped by two jobs. While no metaserver answers, nobody knows
    whether a group has consumers.
    """

    def alerts() -> set[tuple[str, str]]:
        """The alerts that are pending or fire, each with what it is about."""
        found = (prometheus.get("/api/v1/alerts") or {"alerts": []})["alerts"]
        labels = [each["labels"] for each in found]
        return {(each["alertname"], each.get("group") or each.get("job", "")) for each in labels}

    without_consumer = ("KeylaneGroupHasNoConsumer", GROUP)
    scrape_fails = ("KeylaneScrapeFails", "control")
    await eventually(lambda: without_consumer in alerts(), what="the alert about the group")
    assert scrape_fails not in alerts()
    cluster.metaserver.terminate()
    await eventually(
        lambda: scrape_fails in alerts() and without_consumer not in alerts(),
        what="the alert about the metaserver",
    )
