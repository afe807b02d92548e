"""Finds problems in the reports of a cluster's servers, with advice for each. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

CLOCK_DIFFERENCE_S_MAX = 2.0
"""Tolerated clock difference in seconds. Servers report their time in whole seconds."""
EXPIRES_SOON_S = 30 * 86_400
DISK_FREE_SHARE_MIN = 0.1


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a server reported to this host. `failure` is the reason why it could not be reached."""

    program: str
    address: str
    failure: str = ""
    advice: str = ""
    version: str = ""
    clock_difference_s: float | None = None
    """The server's clock minus this host's clock, in seconds."""
    certificate_ends_s: float | None = None
    """Expiry of the certificate, in seconds since 1970; None without TLS."""
    certificate_names: tuple[str, ...] = ()
    certificate: str = ""
    """The SHA-256 of the certificate, as hexadecimal digits."""
    authorities: tuple[str, ...] = ()
    """The SHA-256 of each authority that it trusts."""
    own_token: str = ""
    """The first digits of the hash of a broker's token."""
    insecure_network: bool = False
    access_off: bool = False
    not_ready: str = ""
    """The reason why the server is not ready; "" if it is ready."""
    not_ready_advice: str = ""
    shared_machines: tuple[str, ...] = ()
    """Sentences about copies of a broker's data folder that are on one machine."""
    disk_bytes: int | None = None
    disk_free_bytes: int | None = None

    def row(self) -> tuple[object, ...]:
        """Return the row for the server in the table."""
        if self.failure:
            return self.address, self.program, "not reached", None, None, None
        difference_s, expires_s = self.clock_difference_s, self.certificate_ends_s
        total, available = self.disk_bytes, self.disk_free_bytes
        return (
            self.address,
            self.program,
            self.version,
            None if difference_s is None else _format_difference(difference_s),
            "no TLS" if expires_s is None else _format_date(expires_s),
            f"{available / total:.0%}" if total and available is not None else None,
        )


def _format_difference(difference_s: float) -> str:
    """Format a clock difference, which is accurate to one second."""
    return f"{difference_s:+.0f} s" if abs(difference_s) >= 1 else "within 1 s"


class Finding(msgspec.Struct, frozen=True):
    """A problem and what to do about it."""

    problem: str
    advice: str
    address: str = ""
    """The server's address; "" if the problem concerns the whole cluster."""


def judge_reports(
    reports: Sequence[ServerReport], *, own_version: str, now_s: float
) -> list[Finding]:
    """
    Return the problems in the reports.

    Args:
        own_version: the version of keylane on this host.
        now_s: the current time, in seconds since 1970.
    """
    findings = [finding for report in reports for finding in _judge_server(report, now_s)]
    versions = {report.version for report in reports if report.version} | {own_version}
    if len(versions) > 1:
        findings.append(
            Finding(
                f"different versions of keylane: {', '.join(sorted(versions))}; here {own_version}",
                "Install one version on all hosts.",
            )
        )
    return findings


def _judge_server(report: ServerReport, now_s: float) -> list[Finding]:
    address = report.address
    if report.failure:
        return [Finding(report.failure, report.advice, address)]
    findings = []
    if report.not_ready:
        advice = (
            report.not_ready_advice or "It is ready again when this is over; its log has details."
        )
        findings.append(Finding(f"it is not ready: {report.not_ready}", advice, address))
    difference_s, expires_s = report.clock_difference_s, report.certificate_ends_s
    if difference_s is not None and abs(difference_s) > CLOCK_DIFFERENCE_S_MAX:
        direction = "ahead of" if difference_s > 0 else "behind"
        findings.append(
            Finding(
                f"its clock is {abs(difference_s):.0f} s {direction} that of this host",
                "Let both hosts set their clocks by NTP.",
                address,
            )
        )
    if expires_s is not None and expires_s - now_s < EXPIRES_SOON_S:
        findings.append(
            Finding(
                "its certificate has expired"
                if expires_s <= now_s
                else f"its certificate ends in {(expires_s - now_s) / 86_400:.0f} days",
                "Give it a new certificate and key, and send it SIGHUP.",
                address,
            )
        )
    if report.insecure_network:
        findings.append(
            Finding(
                "insecure_network: other machines read and write without TLS",
                "Set tls_cert, tls_key and tls_ca, and remove insecure_network from its settings.",
                address,
            )
        )
    if report.access_off:
        findings.append(
            Finding(
                "access = off: everybody who reaches it may do everything",
                "Remove access = off from its settings, and give it tokens: docs/ACCESS.md.",
                address,
            )
        )
    findings += [
        Finding(
            sentence,
            "Run its follower on another machine: docs/do/warm-spare.md.",
            address,
        )
        for sentence in report.shared_machines
    ]
    total, available = report.disk_bytes, report.disk_free_bytes
    if total and available is not None and available < total * DISK_FREE_SHARE_MIN:
        findings.append(
            Finding(
                f"{available / total:.0%} of its disk is free",
                "Free some space, add a disk, or lower retention_ms.",
                address,
            )
        )
    return findings


def _format_date(seconds: float) -> str:
    import datetime as dt

    return f"{dt.datetime.fromtimestamp(seconds, dt.UTC):%Y-%m-%d}"
