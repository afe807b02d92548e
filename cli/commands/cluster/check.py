"""`keylane cluster check`: queries every server of a cluster and shows problems with advice.

metaservers ─▶ their brokers ─▶ each: reachable?  ready?  certificate?  metrics (GET /metrics)
                             ─▶ findings (`judge_reports`)
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import TypedDict

import click
import msgspec

from ....admin import Admin
from ....protocol.address import parse_address, parse_addresses
from ....protocol.control import Health
from ....protocol.endpoints import READY
from ....protocol.errors import (
    AccessDeniedError,
    ForeignServerError,
    KeylaneError,
    UnauthenticatedError,
)
from ....protocol.http.tls_settings import TlsSettings
from ....rpc.http_network import HttpNetwork, client_network
from ....rpc.tls.contexts import client_context
from ....rpc.tls.settings import tls_of_environment
from ...options import OutputFormat
from ...screen import make_table, show_data, show_line, show_table
from ...status import showing
from .findings import Finding, ServerReport, judge_reports

TIMEOUT_MS = 5_000


class CheckedCluster(TypedDict):
    """What the check of a cluster found, as JSON."""

    ok: bool
    servers: list[ServerReport]
    findings: list[Finding]


async def check_cluster(meta: str, output: OutputFormat) -> None:
    """
    Check every server and show the reports and findings.

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
            report = await _fetch_report(network, tls, program, address)
            checked += 1
            return report

        with showing(lambda: f"checking servers: {checked} of {len(servers)}"):
            reports = await asyncio.gather(*(check(*server) for server in servers))
    finally:
        await network.close()
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


async def _fetch_report(
    network: HttpNetwork, tls: TlsSettings | None, program: str, address: str
) -> ServerReport:
    """Fetch the report of one server."""
    try:
        sent_s = time.time()
        text, date = await network.get_text(address, "/metrics", timeout_ms=TIMEOUT_MS)
        midpoint_s = (sent_s + time.time()) / 2
        health = await _fetch_health(network, address)
        expires_s, names = await _fetch_certificate(address, tls)
    except KeylaneError as error:
        return ServerReport(
            program=program, address=address, failure=error.message, advice=error.hint
        )
    metrics = _parse_metrics(text)
    difference_s = None
    if date:
        # The header is rounded down to whole seconds; on average, half a second is missing.
        difference_s = parsedate_to_datetime(date).timestamp() + 0.5 - midpoint_s
    return ServerReport(
        program=program,
        address=address,
        version=metrics.version,
        clock_difference_s=difference_s,
        certificate_ends_s=expires_s,
        certificate_names=names,
        insecure_network=metrics.insecure,
        access_off=metrics.access_off,
        not_ready="" if health.ready else health.reason,
        not_ready_advice=str(health.details.get("advice", "")),
        disk_bytes=metrics.disk_bytes,
        disk_free_bytes=metrics.disk_free_bytes,
    )


async def _fetch_health(network: HttpNetwork, address: str) -> Health:
    """Fetch a server's health. Raises KeylaneError if it does not respond."""
    text, _date = await network.get_text(
        address, READY.path, timeout_ms=TIMEOUT_MS, statuses=(200, 503)
    )
    try:
        return msgspec.json.decode(text, type=Health)
    except msgspec.MsgspecError as error:
        raise ForeignServerError(
            f"{address} answered GET {READY.path} not as a keylane server: {error}", address=address
        ) from error


class _Metrics(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    insecure: bool
    access_off: bool
    disk_bytes: int | None
    disk_free_bytes: int | None


def _parse_metrics(text: str) -> _Metrics:
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    build = ""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = sample.value
            if sample.name == "keylane_build_info":
                build = sample.labels.get("version", "")
    disk_bytes, free_bytes = (
        values.get(f"keylane_broker_disk_{name}") for name in ("bytes", "free_bytes")
    )
    return _Metrics(
        version=build,
        insecure=bool(values.get("keylane_insecure_network")),
        access_off=bool(values.get("keylane_access_off")),
        disk_bytes=None if disk_bytes is None else int(disk_bytes),
        disk_free_bytes=None if free_bytes is None else int(free_bytes),
    )


async def _fetch_certificate(
    address: str, tls: TlsSettings | None
) -> tuple[float | None, tuple[str, ...]]:
    """Return the expiry, in seconds since 1970, and the names of a server's certificate, which has
    been validated by an earlier connection.
    """
    if tls is None:
        return None, ()
    host, port = parse_address(address)
    try:
        async with asyncio.timeout(TIMEOUT_MS / 1000):
            _reader, writer = await asyncio.open_connection(host, port, ssl=client_context(tls))
    except (OSError, TimeoutError):
        return None, ()
    certificate = writer.get_extra_info("peercert")
    writer.transport.abort()
    names = tuple(name for _kind, name in certificate.get("subjectAltName", ()))
    return float(ssl.cert_time_to_seconds(certificate["notAfter"])), names


def _show_results(
    reports: Sequence[ServerReport], findings: Sequence[Finding], output: OutputFormat
) -> None:
    if output is not OutputFormat.TABLE:
        checked = CheckedCluster(ok=not findings, servers=list(reports), findings=list(findings))
        show_data(output, checked)
        return
    columns = ("address", "program", "version", "clock#", "certificate ends", "disk free")
    show_table(make_table("servers", columns, [report.row() for report in reports]))
    for finding in findings:
        prefix = f"{finding.address}: " if finding.address else ""
        show_line(f"{prefix}{finding.problem}")
        show_line(f"  {finding.advice}")
    if not findings:
        show_line("no problems")
