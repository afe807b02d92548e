"""`keylane cluster`: the options and help of its commands."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...answer import CommonOptions, expand_options
from ...groups import CommandGroup
from ...options import OutputFormat, OutputOption
from ...parameters import Argument, Option
from ...screen import make_table, show_line, show_table

if TYPE_CHECKING:
    from ....admin import ClusterView

cluster_app = CommandGroup()


@cluster_app.add("init", shows=".commands.cluster.init:WrittenCluster")
def cluster_init(
    *,
    folder: Annotated[Path, Argument(metavar="DIR", help="New or empty folder.")],
    host: Annotated[
        list[str],
        Option(metavar="NAME", help="Name or address of a host; give one for each."),
    ],
    meta_host: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Name or address of a host with a metaserver and no broker; then the other hosts "
            "have no metaserver.",
        ),
    ] = None,
    postgresql: Annotated[
        str | None,
        Option(
            envvar="KEYLANE_POSTGRESQL",
            metavar="URL",
            help="Database of a metaserver on each host; without it only the first host has a "
            "metaserver.",
        ),
    ] = None,
    data: Annotated[
        str, Option(metavar="PATH", help="Folder for stored data, on each host.")
    ] = "/var/lib/keylane",
    meta_port: Annotated[int, Option(min=1, max=65_535, help="Port of the metaservers.")] = 7000,
    broker_port: Annotated[int, Option(min=1, max=65_535, help="Port of the brokers.")] = 7100,
    keylane: Annotated[
        str, Option(metavar="PATH", help="Path of the keylane command on each host.")
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


@cluster_app.add("check", shows=".commands.cluster.check:CheckedCluster")
@expand_options
def cluster_check(
    *,
    common: CommonOptions,
) -> None:
    """Check clocks, certificates, names, versions, ports and disks from this host; exit status 1 if
    there is a problem.
    """
    from .check import check_cluster

    common.run(check_cluster)


@cluster_app.add("versions", shows="..admin:ClusterView")
@expand_options
def cluster_versions(*, common: CommonOptions) -> None:
    """Show the version of the cluster, and of each broker and metaserver, to follow an upgrade."""

    def show(view: ClusterView) -> None:
        rows = [
            (
                member.name,
                member.version or "unknown",
                "yes" if member.name in view.held_back_by else "",
            )
            for member in view.members
        ]
        title = f"cluster {view.name}".rstrip() + f": version {view.version}"
        show_table(make_table(title, ("member", "version", "to upgrade"), rows))
        if view.held_back_by:
            show_line("Formats of the newest version are written when every member has it.")

    common.ask(lambda admin: admin.describe_cluster(), show)
