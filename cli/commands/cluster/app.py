"""The commands `keylane cluster …`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from ...answer import Answer, expanded
from ...options import OutputFormat, OutputOption

cluster_app = typer.Typer(
    no_args_is_help=True, help="Files for the hosts of a new cluster; check of a running one."
)


@cluster_app.command("init")
def cluster_init(
    *,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder.")],
    host: Annotated[
        list[str],
        typer.Option(metavar="NAME", help="Name or address of a host; give one for each."),
    ],
    meta_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name or address of a host with a metaserver and no broker; the other hosts have "
            "no metaserver then.",
        ),
    ] = None,
    postgresql: Annotated[
        str | None,
        typer.Option(
            envvar="KEYLANE_POSTGRESQL",
            metavar="URL",
            help="Database of a metaserver on each host; without it the first "
            "host has the only one.",
        ),
    ] = None,
    data: Annotated[
        str, typer.Option(metavar="PATH", help="Folder for stored data, on each host.")
    ] = "/var/lib/keylane",
    meta_port: Annotated[
        int, typer.Option(min=1, max=65_535, help="Port of the metaservers.")
    ] = 7000,
    broker_port: Annotated[
        int, typer.Option(min=1, max=65_535, help="Port of the brokers.")
    ] = 7100,
    keylane: Annotated[
        str, typer.Option(metavar="PATH", help="Where the keylane command is, on each host.")
    ] = "/usr/local/bin/keylane",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Write settings, a private certificate authority, certificates and systemd units for the hosts
    of a new cluster.
    """
    from ...screen import run
    from .init import init_cluster
    from .plan import ClusterPlan

    async def work() -> None:
        plan = ClusterPlan(
            hosts=host,
            meta_only=meta_host or (),
            postgresql=postgresql,
            data=data,
            meta_port=meta_port,
            broker_port=broker_port,
            name=f"k{secrets.token_hex(6)}",
        )
        init_cluster(folder, plan, keylane=keylane, output=output)

    run(output, work())


@cluster_app.command("check")
@expanded
def cluster_check(
    *,
    answer: Answer,
) -> None:
    """Tell what does not fit, seen from this host: clocks, certificates, names, versions, ports,
    disks; status 1 then.
    """
    from .check import check_cluster

    answer.run(check_cluster)


@cluster_app.command("versions")
@expanded
def cluster_versions(*, answer: Answer) -> None:
    """Show the version of the cluster, and of each broker and metaserver: how far an upgrade is."""
    from .versions import show_versions

    answer.run(show_versions)
