"""`keylane cluster init`: writes a folder for each host of a new cluster, with settings,
certificates and systemd units.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from ....protocol.errors import ConfigError, Reason
from ...options import OutputFormat
from ...screen import show_data, show_line
from .certificates import CertificateAuthority, server_names
from .folder import PUBLIC, SECRET
from .plan import BROKER_FILE, CONFIG_FOLDER, SETTINGS_FILE, ClusterPlan, ClusterTokens


def init_cluster(folder: Path, plan: ClusterPlan, *, keylane: str, output: OutputFormat) -> None:
    """
    Write the files and show what to do with them.

    Raises:
        ConfigError: the folder is not empty or cannot be written; its content was not changed.
    """
    _create_folder(folder)
    authority = CertificateAuthority.create("keylane cluster", dt.datetime.now(dt.UTC))
    tokens = ClusterTokens({host: plan.group_of(host) for host in plan.hosts})
    try:
        for path, content, mode in _render_files(plan, authority, tokens, keylane):
            _write(folder / path, content, mode)
    except BaseException as error:
        _remove_contents(folder)
        if not isinstance(error, OSError):
            raise
        raise ConfigError(
            Reason.CLUSTER_FOLDER, f"cannot write to {folder}: {error.strerror}", path=str(folder)
        ) from error
    _show_next_steps(folder, plan, tokens, output)


def _remove_contents(folder: Path) -> None:
    """Remove the files written so far, because the next run needs an empty folder."""
    for path in list(folder.iterdir()):
        with contextlib.suppress(OSError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _create_folder(folder: Path) -> None:
    """Create the folder. Raises ConfigError if this fails or if the folder is not empty."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        existing = next(folder.iterdir(), None)
    except OSError as error:
        raise ConfigError(
            Reason.CLUSTER_FOLDER, f"cannot use {folder}: {error.strerror}", path=str(folder)
        ) from error
    if existing is not None:
        raise ConfigError(
            Reason.CLUSTER_FOLDER,
            f"{folder} is not empty: {existing.name} is in it",
            path=str(folder),
        )


def _render_files(
    plan: ClusterPlan, authority: CertificateAuthority, tokens: ClusterTokens, keylane: str
) -> Iterator[tuple[str, bytes, int]]:
    """Yield the path, content and mode of each file."""
    authority_pair = authority.pair
    yield "ca.pem", authority_pair.certificate, PUBLIC
    yield "ca.key", authority_pair.key, SECRET
    for host in plan.all_hosts:
        pair = authority.issue(server_names(host))
        yield f"{host}/ca.pem", authority_pair.certificate, PUBLIC
        yield f"{host}/server.pem", pair.certificate, PUBLIC
        yield f"{host}/server.key", pair.key, SECRET
        # With PostgreSQL, this file contains the database password.
        yield f"{host}/{SETTINGS_FILE}", plan.settings_of(host, tokens).encode(), SECRET
        if host in plan.hosts:
            yield f"{host}/{BROKER_FILE}", f"{tokens.of_host[host]}\n".encode(), SECRET
        for name, text in plan.units_of(host, keylane).items():
            yield f"{host}/{name}", text.encode(), PUBLIC


def _write(path: Path, content: bytes, mode: int) -> None:
    """Create a file with the given mode from the start, so that a secret is never readable by
    others.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(content)


class WrittenCluster(TypedDict):
    """The files of a new cluster, as JSON."""

    folder: str
    hosts: Sequence[str]
    metaservers: Sequence[str]
    ca: str
    admin_token: str


def _show_next_steps(
    folder: Path, plan: ClusterPlan, tokens: ClusterTokens, output: OutputFormat
) -> None:
    metaservers = ",".join(plan.metaservers)
    if output is not OutputFormat.TABLE:
        written = WrittenCluster(
            folder=str(folder),
            hosts=plan.all_hosts,
            metaservers=plan.metaservers,
            ca=str(folder / "ca.pem"),
            admin_token=tokens.admin,
        )
        show_data(output, written)
        return
    show_line(f"{folder} has a folder for each of {len(plan.all_hosts)} hosts.")
    show_line(
        f"  Copy the files of {folder}/HOST to {CONFIG_FOLDER} of that host, owned by the user "
        "keylane,"
    )
    show_line("  and the .service files to /etc/systemd/system; start the metaservers first.")
    if plan.one_group:
        show_line(
            f"  {plan.hosts[0]} makes the broker group: once it has started, set follow = true in "
            "its keylane.toml, as on the others."
        )
    show_line(
        f"  Keep {folder}/ca.key off the hosts: it can sign certificates that all of them trust."
    )
    show_line(f"  The administrator's token, shown this once: {tokens.admin}")
    show_line("  Put it into a file that only you can read, and name it in KEYLANE_TOKEN_FILE.")
    show_line(f"Clients:  KEYLANE_TLS_CA={folder}/ca.pem  KEYLANE_META={metaservers}")
    show_line("Then:     keylane cluster check")
