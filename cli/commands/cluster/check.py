"""`keylane cluster check`: asks every server of a cluster, and shows problems with advice.

metaservers ─▶ their brokers ─▶ each: reached?  ready?  certificate?  figures (GET /metrics)
                             ─▶ findings (`judge_reports`)
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from importlib.metadata import version

import msgspec
import typer

from ....admin import Admin
from ....protocol.address import addresses_of, parse_address
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
from ...screen import make_table, show_json, show_line, show_table
from .findings import Finding, ServerReport, judge_reports

TIMEOUT_MS = 5_000


async def check_cluster(meta: str, output: OutputFormat) -> None:
    """
    Check every server, and show the reports and findings.

    Raises:
        ConfigError: an address or a file of TLS cannot be used.
        typer.Exit: there are findings; the status is 1.
    """
    addresses = addresses_of(meta)
    tls = tls_of_environment()
    network = client_network(tls)
    network.add_metaservers(addresses)
    findings: list[Finding] = []
    try:
        brokers = await _brokers(addresses, findings)
        servers = [("metaserver", address) for address in addresses] + [
            ("broker", address) for address in brokers
        ]
        reports = await asyncio.gather(*(_report(network, tls, *server) for server in servers))
    finally:
        await network.close()
    findings += judge_reports(reports, own_version=version("keylane"), now_s=time.time())
    _show(reports, findings, output)
    if findings:
        raise typer.Exit(1)


async def _brokers(addresses: Sequence[str], findings: list[Finding]) -> list[str]:
    """Return the addresses of the brokers that the metaservers know; brokers that are not available
    become findings.
    """
    try:
        async with Admin(addresses) as admin:
            listed = (await admin.list_brokers()).brokers
    except (AccessDeniedError, UnauthenticatedError) as error:
        findings.append(Finding(f"the brokers are not known: {error.message}", error.hint))
        return []
    except KeylaneError:  # the report of each metaserver has the reason
        return []
    if not listed:
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
        for broker in listed
        if not broker.available
    ]
    return [broker.address for broker in listed]


async def _report(
    network: HttpNetwork, tls: TlsSettings | None, program: str, address: str
) -> ServerReport:
    """Ask one server for its report."""
    try:
        asked_s = time.time()
        text, date = await network.text(address, "/metrics", timeout_ms=TIMEOUT_MS)
        middle_s = (asked_s + time.time()) / 2
        health = await _health(network, address)
        ends_s, names = await _certificate(address, tls)
    except KeylaneError as error:
        return ServerReport(
            program=program, address=address, failure=error.message, advice=error.hint
        )
    figures = _figures(text)
    clock_s = None
    if date:
        # The header has whole seconds, rounded down: half a second is the best estimate of the
        # rest.
        clock_s = parsedate_to_datetime(date).timestamp() + 0.5 - middle_s
    return ServerReport(
        program=program,
        address=address,
        version=figures.version,
        clock_difference_s=clock_s,
        certificate_ends_s=ends_s,
        certificate_names=names,
        insecure_network=figures.insecure,
        access_off=figures.access_off,
        not_ready="" if health.ready else health.reason,
        not_ready_advice=str(health.details.get("advice", "")),
        disk_bytes=figures.disk_bytes,
        disk_free_bytes=figures.disk_free_bytes,
    )


async def _health(network: HttpNetwork, address: str) -> Health:
    """Ask a server whether it is ready; raise KeylaneError if it does not answer."""
    text, _date = await network.text(
        address, READY.path, timeout_ms=TIMEOUT_MS, statuses=(200, 503)
    )
    try:
        return msgspec.json.decode(text, type=Health)
    except msgspec.MsgspecError as error:
        raise ForeignServerError(
            f"{address} answered GET {READY.path} not as a keylane server: {error}", address=address
        ) from error


class _Figures(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    insecure: bool
    access_off: bool
    disk_bytes: int | None
    disk_free_bytes: int | None


def _figures(text: str) -> _Figures:
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    build = ""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = sample.value
            if sample.name == "keylane_build_info":
                build = sample.labels.get("version", "")
    disk, free = (values.get(f"keylane_broker_disk_{name}") for name in ("bytes", "free_bytes"))
    return _Figures(
        version=build,
        insecure=bool(values.get("keylane_insecure_network")),
        access_off=bool(values.get("keylane_access_off")),
        disk_bytes=None if disk is None else int(disk),
        disk_free_bytes=None if free is None else int(free),
    )


async def _certificate(
    address: str, tls: TlsSettings | None
) -> tuple[float | None, tuple[str, ...]]:
    """Return the end and the names of the server's certificate, which an earlier connection has
    found valid.
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


def _show(
    reports: Sequence[ServerReport], findings: Sequence[Finding], output: OutputFormat
) -> None:
    if output is OutputFormat.JSON:
        show_json({"ok": not findings, "servers": list(reports), "findings": list(findings)})
        return
    heads = ("address", "program", "version", "clock#", "certificate ends", "disk free")
    show_table(make_table("servers", heads, [report.row() for report in reports]))
    for finding in findings:
        place = f"{finding.address}: " if finding.address else ""
        show_line(f"{place}{finding.problem}")
        show_line(f"  {finding.advice}")
    if not findings:
        show_line("no problems")
