"""Asks one server of a cluster for what `keylane cluster` reports and compares: its health, metrics
and certificate.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from email.utils import parsedate_to_datetime
from hashlib import sha256

import msgspec

from ....protocol.address import parse_address
from ....protocol.control import Health
from ....protocol.errors import KeylaneError
from ....protocol.http.tls_settings import TlsSettings
from ....rpc.http_network import HttpNetwork
from ....rpc.tls.contexts import client_context
from ...health import TIMEOUT_MS, fetch_health
from .findings import ServerReport


async def fetch_report(
    network: HttpNetwork, tls: TlsSettings | None, program: str, address: str
) -> ServerReport:
    """Fetch the report of one server; a failure is in the report."""
    try:
        sent_s = time.time()
        text, date = await network.get_text(address, "/metrics", timeout_ms=TIMEOUT_MS)
        midpoint_s = (sent_s + time.time()) / 2
        health = await fetch_health(network, address)
        expires_s, names, digest = await _fetch_certificate(address, tls)
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
        certificate=digest,
        authorities=metrics.authorities,
        own_token=metrics.own_token,
        insecure_network=metrics.insecure,
        access_off=metrics.access_off,
        not_ready="" if health.ready else health.reason,
        not_ready_advice=str(health.details.get("advice", "")),
        shared_machines=_shared_machines(health),
        disk_bytes=metrics.disk_bytes,
        disk_free_bytes=metrics.disk_free_bytes,
    )


def _shared_machines(health: Health) -> tuple[str, ...]:
    copies = health.details.get("copies", {}).values()
    return tuple(each["shared_machine"] for each in copies if each.get("shared_machine"))


class _Metrics(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    insecure: bool
    access_off: bool
    disk_bytes: int | None
    disk_free_bytes: int | None
    authorities: tuple[str, ...]
    own_token: str


def _parse_metrics(text: str) -> _Metrics:
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    build = own_token = ""
    authorities = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = sample.value
            if sample.name == "keylane_build_info":
                build = sample.labels.get("version", "")
            elif sample.name == "keylane_own_token_info":
                own_token = sample.labels.get("sha256", "")
            elif sample.name == "keylane_tls_authority_end_seconds":
                authorities.append(sample.labels.get("sha256", ""))
    disk_bytes, free_bytes = (
        values.get(f"keylane_broker_disk_{name}") for name in ("bytes", "free_bytes")
    )
    return _Metrics(
        version=build,
        insecure=bool(values.get("keylane_insecure_network")),
        access_off=bool(values.get("keylane_access_off")),
        disk_bytes=None if disk_bytes is None else int(disk_bytes),
        disk_free_bytes=None if free_bytes is None else int(free_bytes),
        authorities=tuple(authorities),
        own_token=own_token,
    )


async def _fetch_certificate(
    address: str, tls: TlsSettings | None
) -> tuple[float | None, tuple[str, ...], str]:
    """Return the expiry, in seconds since 1970, the names and the SHA-256 of a server's
    certificate, which has been validated by an earlier connection.
    """
    if tls is None:
        return None, (), ""
    host, port = parse_address(address)
    try:
        async with asyncio.timeout(TIMEOUT_MS / 1000):
            _reader, writer = await asyncio.open_connection(host, port, ssl=client_context(tls))
    except (OSError, TimeoutError):
        return None, (), ""
    encoded = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    certificate = writer.get_extra_info("peercert")
    writer.transport.abort()
    names = tuple(name for _kind, name in certificate.get("subjectAltName", ()))
    expires_s = float(ssl.cert_time_to_seconds(certificate["notAfter"]))
    return expires_s, names, sha256(encoded).hexdigest()
