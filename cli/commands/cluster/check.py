"""`keylane cluster check`: queries every server of a cluster and shows problems with advice.

metaservers ─▶ their brokers ─▶ each: reachable?  ready?  certificate?  metrics (GET /metrics)
                             ─▶ findings (`judge_reports`)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict

import click

from ....admin import Admin
from ....protocol.address import parse_addresses
from ....protocol.errors import (
    AccessDeniedError,
    KeylaneError,
    UnauthenticatedError,
)
from ....rpc.http_network import client_network
from ....rpc.tls.settings import tls_of_environment
from ...options import OutputFormat
from ...screen import make_table, show_data, show_line, show_table
from ...status import showing
from .findings import Finding, ServerReport, judge_reports
from .folder import ClusterFolder
from .reports import fetch_report
from .served import differences


class CheckedCluster(TypedDict):
    """What the check of a cluster found, as JSON."""

    ok: bool
    servers: list[ServerReport]
    findings: list[Finding]


async def check_cluster(meta: str, output: OutputFormat, folder: Path | None = None) -> None:
    """
    Check every server and show the reports and findings.

    Args:
        folder: the folder of the cluster, whose files are compared with what servers use.

    Raises:
        ConfigError: an address or a TLS file cannot be used.
        click.exceptions.Exit: there are findings; the exit status is 1.
    """
    addresses = parse_addresses(meta)
    tls = tls_of_environment()
    network = client_network(tls)
    network.add_metaservers(addresses)
    findings: list[Finding] = []
    try:
        brokers = await _broker_addresses(addresses, findings)
        servers = [("metaserver", address) for address in addresses] + [
            ("broker", address) for address in brokers
        ]
        checked = 0

        async def check(program: str, address: str) -> ServerReport:
            nonlocal checked
            report = await fetch_report(network, tls, program, address)
            checked += 1
            return report

        with showing(lambda: f"checking servers: {checked} of {len(servers)}"):
            reports = await asyncio.gather(*(check(*server) for server in servers))
    finally:
        await network.close()
    if folder is not None:
        written = ClusterFolder.read(folder)
        findings += await differences(written, list(written.hosts.values()))
    findings += judge_reports(reports, own_version=version("keylane"), now_s=time.time())
    _show_results(reports, findings, output)
    if findings:
        raise click.exceptions.Exit(1)


async def _broker_addresses(addresses: Sequence[str], findings: list[Finding]) -> list[str]:
    """Return the addresses of the brokers known to the metaservers. Adds a finding for each broker
    that is not available.
    """
    try:
        async with Admin(addresses) as admin:
            views = (await admin.list_brokers()).brokers
    except (AccessDeniedError, UnauthenticatedError) as error:
        findings.append(Finding(f"the brokers are not known: {error.message}", error.hint))
        return []
    except KeylaneError:  # the metaservers' own reports contain the reason
        return []
    if not views:
        findings.append(
            Finding(
                "no broker has reported itself",
                "Start the brokers; their setting meta must name the metaservers.",
            )
        )
    findings += [
        Finding(
            f"broker group {broker.broker_group} has not reported itself for "
            f"{broker.silent_ms / 1000:.0f} s",
            "Start it, and check its log.",
            broker.address,
        )
        for broker in views
        if not broker.available
    ]
    return [broker.address for broker in views]


def show_findings(findings: Sequence[Finding]) -> None:
    """Show problems, each with its advice."""
    for finding in findings:
        prefix = f"{finding.address}: " if finding.address else ""
        show_line(f"{prefix}{finding.problem}")
        show_line(f"  {finding.advice}")


def _show_results(
    reports: Sequence[ServerReport], findings: Sequence[Finding], output: OutputFormat
) -> None:
    if output is not OutputFormat.TABLE:
        checked = CheckedCluster(ok=not findings, servers=list(reports), findings=list(findings))
        show_data(output, checked)
        return
    columns = ("address", "program", "version", "clock#", "certificate ends", "disk free")
    show_table(make_table("servers", columns, [report.row() for report in reports]))
    show_findings(findings)
    if not findings:
        show_line("no problems")
