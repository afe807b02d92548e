"""`keylane cluster cert renew`, `ca rotate` and `token rotate`: replace certificates, the authority
and tokens while the cluster runs.

Each command writes what is due into the folder, and continues only when every server that matters
uses it. What is done is in the files, so each command may be repeated at any time.

    authority   trusted beside the old one ─▶ signs all certificates ─▶ the old one is removed
    token       known to metaservers ─▶ used by the broker ─▶ the old one is removed
"""

from __future__ import annotations

import contextlib
import datetime as dt
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from ....protocol.access.tokens import token_hash
from ....protocol.errors import ConfigError, Reason
from ....rpc.access.token_file import token_in_file
from ....rpc.tls.contexts import names_of, read_certificate, read_certificates
from .certificates import CertificateAuthority, has_issued, server_names
from .delivery import ClusterStep, bring
from .findings import EXPIRES_SOON_S, Finding
from .folder import (
    AUTHORITY,
    AUTHORITY_KEY,
    NEXT_AUTHORITY,
    NEXT_KEY,
    OLD_AUTHORITY,
    PUBLIC,
    SECRET,
    ClusterFolder,
    Host,
    draw_token,
    replace_file,
)
from .plan import BROKER_FILE
from .served import differences, token_differences


# ── certificates ──────────────────────────────────────────────────────────────────────────────────
async def renew_certificates(
    path: Path,
    names: Sequence[str],
    *,
    every: bool,
    deliver: str | None,
) -> ClusterStep:
    """
    Renew the certificates of hosts, and check that their servers use them.

    Args:
        names: the hosts; none means all.
        every: also those that are not due.

    Raises:
        ConfigError: a host is unknown, or a file cannot be used; nothing was changed.
    """
    folder = ClusterFolder.read(path)
    hosts = folder.select(names)
    authority = _load_authority(folder)
    now = dt.datetime.now(dt.UTC)
    trusted = read_certificates(folder.path / AUTHORITY)
    due = [host for host in hosts if every or _is_due(host, trusted, now)]
    done = [_renew(host, authority) for host in due]
    if not done:
        done.append("no certificate is due: each is valid for 30 days or more")
    return ClusterStep(done, await _bring(folder, hosts, deliver))


def _load_authority(folder: ClusterFolder) -> CertificateAuthority:
    return CertificateAuthority.load(
        folder.path / AUTHORITY, folder.path / AUTHORITY_KEY, dt.datetime.now(dt.UTC)
    )


def _is_due(host: Host, trusted: Sequence[x509.Certificate], now: dt.datetime) -> bool:
    """Return True if the certificate ends soon, does not fit its key, or has another authority."""
    certificate = _own_certificate(host)
    if certificate is None or not any(has_issued(each, certificate) for each in trusted):
        return True
    return (certificate.not_valid_after_utc - now).total_seconds() < EXPIRES_SOON_S


def _own_certificate(host: Host) -> x509.Certificate | None:
    """Return the certificate of the host's files, or None if they do not fit together."""
    try:
        certificate = read_certificate(host.folder / "server.pem")
        key = load_pem_private_key((host.folder / "server.key").read_bytes(), None)
    except (ConfigError, OSError, ValueError, TypeError):
        return None
    return certificate if certificate.public_key() == key.public_key() else None


def _renew(host: Host, authority: CertificateAuthority) -> str:
    """Write a new certificate with the names of the old one. Returns what was done."""
    names = server_names(host.machine)
    with contextlib.suppress(ConfigError):  # it is missing or unreadable
        old = read_certificate(host.folder / "server.pem")  # its key may be gone after a crash
        names += sorted(names_of(old) - set(names))
    pair = authority.issue(names)
    # between the two, the files do not fit together: then the next run renews them again
    replace_file(host.folder / "server.key", pair.key, SECRET)
    replace_file(host.folder / "server.pem", pair.certificate, PUBLIC)
    end = x509.load_pem_x509_certificate(pair.certificate).not_valid_after_utc
    return f"{host.name}: a new certificate, which ends on {end:%Y-%m-%d}"


# ── the authority ─────────────────────────────────────────────────────────────────────────────────
async def rotate_authority(path: Path, *, new: bool, yes: bool, deliver: str | None) -> ClusterStep:
    """
    Continue the replacement of the authority as far as the servers allow.

    Args:
        new: begin one, if none is in progress.
        yes: every client has the authorities of the folder.

    Raises:
        ConfigError: a file cannot be used, or a server is not ready for the next step; nothing was
            changed.
    """
    folder = ClusterFolder.read(path)
    hosts = list(folder.hosts.values())
    done: list[str] = []
    has_begun = (path / OLD_AUTHORITY).exists()
    authority = _load_authority(folder)
    if not has_begun and not new:
        end = authority.certificate.not_valid_after_utc
        done.append(
            f"no authority is being replaced; the one in use ends on {end:%Y-%m-%d}, and --new "
            "replaces it"
        )
        return ClusterStep(done, await _bring(folder, hosts, deliver))
    if not has_begun:
        _check_ready(await _bring(folder, hosts, deliver), "the replacement begins")
        _draw_authority(folder, authority)
    if (path / NEXT_KEY).exists():
        done += _trust_both(folder)
        left = await _bring(folder, hosts, deliver)
        if not left and (done or not yes):
            left = [
                Finding(
                    f"clients need {path / AUTHORITY} before the new authority signs",
                    f"Give {path / AUTHORITY} to every client, and then pass --yes.",
                )
            ]
        if done or not yes:
            return ClusterStep(done, left)
        _check_ready(left, "the new authority signs")
        (path / NEXT_KEY).replace(path / AUTHORITY_KEY)
        (path / NEXT_AUTHORITY).unlink(missing_ok=True)
    authority = _load_authority(folder)
    reissued = []
    for host in hosts:
        own = _own_certificate(host)
        if own is None or not has_issued(authority.certificate, own):
            reissued.append(_renew(host, authority))
    if reissued:
        done += ["step 2 of 3: the new authority signs", *reissued]
    left = await _bring(folder, hosts, deliver)
    if left and done:
        return ClusterStep(done, left)
    _check_ready(left, "the old authority is removed")
    old = read_certificates(path / OLD_AUTHORITY)
    kept = [each for each in read_certificates(path / AUTHORITY) if each not in old]
    folder.put_authority(_to_pem(kept))
    (path / OLD_AUTHORITY).unlink()
    done.append(f"step 3 of 3: the old authority is removed from {AUTHORITY}")
    return ClusterStep(done, await _bring(folder, hosts, deliver))


def _draw_authority(folder: ClusterFolder, old: CertificateAuthority) -> None:
    """Write a new authority beside the old one."""
    name = f"keylane cluster {secrets.token_hex(3)}"
    pair = CertificateAuthority.create(name, dt.datetime.now(dt.UTC)).pair
    replace_file(folder.path / NEXT_AUTHORITY, pair.certificate, PUBLIC)
    replace_file(folder.path / NEXT_KEY, pair.key, SECRET)
    # the last file: a replacement is in progress while it is there
    replace_file(folder.path / OLD_AUTHORITY, old.pair.certificate, PUBLIC)


def _trust_both(folder: ClusterFolder) -> list[str]:
    """Write both authorities for everybody. Returns what was done."""
    present = read_certificates(folder.path / AUTHORITY)
    (new,) = read_certificates(folder.path / NEXT_AUTHORITY)
    wanted = [*(each for each in present if each != new), new]
    files = [folder.path / AUTHORITY, *(each.folder / AUTHORITY for each in folder.hosts.values())]
    if all(read_certificates(file) == wanted for file in files):
        return []
    folder.put_authority(_to_pem(wanted))
    return [f"step 1 of 3: {AUTHORITY} has the old and the new authority"]


def _to_pem(certificates: Sequence[x509.Certificate]) -> bytes:
    return b"".join(each.public_bytes(Encoding.PEM) for each in certificates)


def _check_ready(left: Sequence[Finding], step: str) -> None:
    """Raise ConfigError if a server does not use the files of the folder yet."""
    if left:
        problems = "; ".join(f"{each.address}: {each.problem}" for each in left)
        raise ConfigError(Reason.AUTHORITY_IN_USE, f"before {step}: {problems[:2000]}")


# ── the tokens of brokers ─────────────────────────────────────────────────────────────────────────
async def rotate_tokens(
    path: Path,
    names: Sequence[str],
    *,
    new: bool,
    deliver: str | None,
) -> ClusterStep:
    """
    Continue the replacement of brokers' tokens as far as the servers allow.

    Args:
        names: the hosts; none means all that have a broker.
        new: begin one, for hosts of which no token is being replaced.

    Raises:
        ConfigError: a host is unknown, or a file cannot be used; nothing was changed.
    """
    folder = ClusterFolder.read(path)
    hosts = [host for host in folder.select(names) if host.group]
    for host in hosts:
        host.token()  # an unreadable one is an error before anything is changed
    done, left = [], list[Finding]()
    for host in hosts:
        replacement = _TokenReplacement(folder, host, deliver)
        if new:
            replacement.begin()
        left += await replacement.advance()
        done += replacement.done
    if not done and not left:
        done = ["no token is being replaced; --new replaces them"]
    return ClusterStep(done, left)


class _TokenReplacement:
    """The replacement of one broker's token."""

    def __init__(self, folder: ClusterFolder, host: Host, deliver: str | None) -> None:
        self._folder, self._host, self._deliver = folder, host, deliver
        self._next, self._old = folder.next_token_path(host), folder.old_token_path(host)
        self._current = host.folder / BROKER_FILE
        self.done: list[str] = []

    def begin(self) -> None:
        """Draw a new token, unless one is being replaced."""
        if not self._next.exists() and not self._old.exists():
            replace_file(self._next, f"{draw_token()[0]}\n".encode(), SECRET)

    async def advance(self) -> list[Finding]:
        """Do the next steps; returns what has to be done before the one that is left."""
        if self._next.exists():
            left = await self._make_known()
            if left:
                return left
            if not self._old.exists():
                replace_file(self._old, self._current.read_bytes(), SECRET)
            replace_file(self._current, self._next.read_bytes(), SECRET)
            self._next.unlink()
            self.done.append(f"{self._host.name}: step 2 of 3: its files have the new token")
        if not self._old.exists():
            return []
        left = await _bring(self._folder, [self._host], self._deliver)
        if left:
            return left
        return await self._forget_old()

    async def _make_known(self) -> list[Finding]:
        """Write the new token for the metaservers. Returns one finding for each that does not know
        it.
        """
        token = token_in_file(self._next)
        if self._folder.put_hashes(add={token_hash(token): self._host.group}):
            self.done.append(f"{self._host.name}: step 1 of 3: metaservers get the new token")
        return await self._bring_token(token, wanted=True)

    async def _forget_old(self) -> list[Finding]:
        """Remove the old token from the metaservers. Returns a finding for each that accepts it."""
        token = token_in_file(self._old)
        if self._folder.put_hashes(add={}, drop=[token_hash(token)]):
            self.done.append(f"{self._host.name}: step 3 of 3: metaservers forget the old token")
        left = await self._bring_token(token, wanted=False)
        if not left:
            self._old.unlink()
        return left

    async def _bring_token(self, token: str, *, wanted: bool) -> list[Finding]:
        ask = partial(token_differences, self._folder, token, wanted=wanted)
        return await bring(ask, self._folder.hosts.values(), self._deliver)


async def _bring(
    folder: ClusterFolder, hosts: Sequence[Host], deliver: str | None
) -> list[Finding]:
    return await bring(partial(differences, folder, hosts), hosts, deliver)
