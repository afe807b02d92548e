"""Compares the files of a cluster's folder with what its servers use.

DIR/HOST ── copied to the host, SIGHUP ──▶ servers
certificate that is served, metrics ──▶ `differences` ──▶ findings with the next step
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from ....protocol.access.tokens import token_hash
from ....protocol.endpoints import CAPABILITY
from ....protocol.errors import KeylaneError, UnauthenticatedError
from ....protocol.http.access import AskCapability, Capabilities
from ....protocol.http.tls_settings import TlsSettings
from ....rpc.http_network import HttpNetwork, client_network
from ....rpc.operating.served_network import TOKEN_DIGITS
from ....rpc.tls.contexts import fingerprint, read_certificate, read_certificates
from ....rpc.tls.settings import tls_of_environment
from ...health import TIMEOUT_MS
from .findings import Finding, ServerReport
from .folder import AUTHORITY, ClusterFolder, Host
from .plan import BROKER_FILE, SETTINGS_FILE
from .reports import fetch_report


def folder_tls(folder: ClusterFolder) -> TlsSettings:
    """Return the TLS settings of a client that trusts the authorities of the folder."""
    ca = str(folder.path / AUTHORITY)
    own = tls_of_environment()
    return TlsSettings(ca=ca) if own is None else replace(own, ca=ca)


async def differences(folder: ClusterFolder, hosts: Sequence[Host]) -> list[Finding]:
    """
    Return in what the servers on some hosts differ from the folder, with what to do about it.

    Raises:
        ConfigError: a file of the folder, or the token of this client, cannot be used.
    """
    tls = folder_tls(folder)
    network = client_network(tls)
    network.add_metaservers(folder.metaservers)
    try:
        found = await asyncio.gather(
            *(
                _differences_of(folder, network, tls, host, program, address)
                for host in hosts
                for program, address in host.servers
            )
        )
    finally:
        await network.close()
    return [finding for findings in found for finding in findings]


async def _differences_of(
    folder: ClusterFolder,
    network: HttpNetwork,
    tls: TlsSettings,
    host: Host,
    program: str,
    address: str,
) -> list[Finding]:
    report = await fetch_report(network, tls, program, address)
    if report.failure:
        # nobody can ask a follower that listens nowhere
        is_silent = program == "broker" and host.may_be_silent
        return [] if is_silent else [Finding(report.failure, report.advice, address)]
    findings = [
        Finding(text, advice_of(host, files), address) for text, files in _old_files(host, report)
    ]
    if program == "metaserver" and not findings:
        findings += await _unknown_tokens(folder, tls, host, address)
    return findings


def _old_files(host: Host, report: ServerReport) -> list[tuple[str, str]]:
    """Return what a server does not use yet: what it uses instead, and the files. Raises
    ConfigError.
    """
    found = []
    served = read_certificate(host.folder / "server.pem")
    if report.certificate != fingerprint(served):
        found.append(("it serves another certificate than the folder has", "server.pem server.key"))
    trusted = {fingerprint(each) for each in read_certificates(host.folder / AUTHORITY)}
    if set(report.authorities) != trusted:
        found.append(("it trusts other authorities than the folder has", AUTHORITY))
    if report.program == "broker" and report.own_token != token_hash(host.token())[:TOKEN_DIGITS]:
        found.append(("it uses another token than the folder has", BROKER_FILE))
    return found


def advice_of(host: Host, files: str) -> str:
    """Return how files of the folder come into use on a host."""
    return (
        f"Copy {files} of {host.folder} to {host.config_folder} on {host.machine}, and run there: "
        f"systemctl reload {host.units}"
    )


async def _unknown_tokens(
    folder: ClusterFolder, tls: TlsSettings, host: Host, address: str
) -> list[Finding]:
    """Return a finding if a metaserver refuses the token of a broker."""
    refused = [
        each.name
        for each in folder.hosts.values()
        if each.group and not await accepts(tls, address, each.token())
    ]
    if not refused:
        return []
    text = f"it does not know the broker's token of {', '.join(refused)}"
    return [Finding(text, advice_of(host, SETTINGS_FILE), address)]


async def accepts(tls: TlsSettings, metaserver: str, token: str) -> bool:
    """Return True if a metaserver accepts a token. Raises KeylaneError if it cannot be asked."""
    network = HttpNetwork(tls, token=token)
    network.add_metaservers([metaserver])
    try:
        await network.control(
            CAPABILITY.method,
            metaserver,
            CAPABILITY.path,
            Capabilities,
            body=AskCapability(),
            timeout_ms=TIMEOUT_MS,
        )
    except UnauthenticatedError:
        return False
    finally:
        await network.close()
    return True


async def token_differences(folder: ClusterFolder, token: str, *, wanted: bool) -> list[Finding]:
    """Return a finding for each metaserver that cannot be asked, or that does not accept a token if
    it is `wanted`, or accepts it if it is not.
    """
    tls = folder_tls(folder)
    findings = []
    for host in folder.hosts.values():
        for program, address in host.servers:
            if program != "metaserver":
                continue
            try:
                is_accepted = await accepts(tls, address, token)
            except KeylaneError as error:
                findings.append(Finding(error.message, error.hint, address))
                continue
            if is_accepted != wanted:
                text = "does not know the new token" if wanted else "still accepts the old token"
                advice = advice_of(host, SETTINGS_FILE)
                findings.append(Finding(f"it {text}", advice, address))
    return findings
