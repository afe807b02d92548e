"""`keylane cluster`: the options and help of its commands."""

from __future__ import annotations

import secrets
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from ...answer import CommonOptions, expand_options
from ...groups import CommandGroup
from ...options import DryRunOption, OutputFormat, OutputOption, YesOption
from ...parameters import Argument, Option
from ...screen import make_table, show_line, show_table

if TYPE_CHECKING:
    from ....admin import ClusterView
    from .delivery import ClusterStep

cluster_app = CommandGroup()
cert_app = CommandGroup("cert", "Renew the certificates of a cluster's hosts.")
ca_app = CommandGroup("ca", "Replace the certificate authority of a cluster.")
token_app = CommandGroup("token", "Replace the tokens of a cluster's brokers.")

FolderArgument = Annotated[
    Path, Argument(metavar="DIR", help="The folder that `keylane cluster init` wrote.")
]
HostArgument = Annotated[str, Argument(metavar="NAME", help="Name or address of the host.")]
HostsArgument = Annotated[
    list[str] | None, Argument(metavar="[NAME]...", help="Only these hosts; all by default.")
]
DeliverOption = Annotated[
    str | None,
    Option(
        "--deliver",
        metavar="COMMAND",
        help="Copies a host's files there and reloads its programs; it is called with the host's "
        "name and its folder, for each host that differs.",
    ),
]
KeylaneOption = Annotated[
    str, Option(metavar="PATH", help="Path of the keylane command on the host.")
]
NewOption = Annotated[bool, Option("--new", help="Begin; without it the command only continues.")]


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
    one_group: Annotated[
        bool,
        Option(
            "--one-group",
            help="The hosts have copies of one broker's data; one of them takes its place when it "
            "is gone.",
        ),
    ] = False,
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
            one_group=one_group,
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
    folder: Annotated[
        Path | None,
        Option(metavar="DIR", help="Also compare what servers use with the files of this folder."),
    ] = None,
    common: CommonOptions,
) -> None:
    """Check clocks, certificates, names, versions, ports and disks from this host; exit status 1 if
    there is a problem.
    """
    from .check import check_cluster

    common.run(check_cluster, folder)


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


@cluster_app.add("balance", shows=".commands.cluster.balance:Balanced")
@expand_options
def cluster_balance(
    *,
    dry_run: DryRunOption = False,
    exclude: Annotated[
        list[str] | None,
        Option(
            "--exclude",
            metavar="GROUP",
            help="Leave this broker group as it is; may be repeated.",
        ),
    ] = None,
    at_once: Annotated[
        int, Option(min=1, max=16, help="Most moves under way, of different subjects.")
    ] = 2,
    stop: Annotated[
        bool, Option("--stop", help="Stop the metaservers that balance by themselves.")
    ] = False,
    start: Annotated[bool, Option("--start", help="Let them balance again.")] = False,
    yes: YesOption = False,
    common: CommonOptions,
) -> None:
    """
    Spread the open partitions evenly over the broker groups, for example after one has joined, and
    the broker groups over the hosts that have copies of them.

    New messages of a partition go to its new broker group; stored ones stay until retention
    removes them. Ctrl-C ends it at any time, and the next call continues.
    """
    from .balance import balance_cluster, set_stopped, show_stopped

    if stop and start:
        raise click.BadParameter("pass either --stop or --start", param_hint="--stop")
    if stop or start:
        if dry_run or exclude:
            hint = "--stop" if stop else "--start"
            raise click.BadParameter("excludes --dry-run and --exclude", param_hint=hint)
        common.ask(lambda admin: set_stopped(admin, stopped=stop), show_stopped)
        return
    common.run(
        balance_cluster,
        exclude=exclude or (),
        dry_run=dry_run,
        at_once=at_once,
        yes=yes,
    )


def _run_step(output: OutputFormat, work: Coroutine[Any, Any, ClusterStep]) -> None:
    """Do a step, and show it. The exit status is 1 if something is left to do."""
    from ...screen import run
    from .delivery import show_step

    async def show() -> None:
        show_step(output, await work)

    run(output, show())


@cluster_app.add("add-host", shows=".commands.cluster.delivery:ClusterStep")
def cluster_add_host(
    *,
    folder: FolderArgument,
    name: HostArgument,
    copy_of: Annotated[
        str,
        Option(
            metavar="GROUP", help="The host keeps a copy of this broker group.", show_default=""
        ),
    ] = "",
    metaserver: Annotated[
        bool, Option("--metaserver", help="The host gets a metaserver, too (PostgreSQL).")
    ] = False,
    data: Annotated[
        str,
        Option(metavar="PATH", help="Folder for stored data.", show_default="as on another host"),
    ] = "",
    keylane: KeylaneOption = "/usr/local/bin/keylane",
    deliver: DeliverOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Write the files of another host with a broker, and let the metaservers know its token; exit
    status 1 while something is left to do.
    """
    from .hosts import add_host

    _run_step(
        output,
        add_host(
            folder,
            name,
            copy_of=copy_of,
            has_metaserver=metaserver,
            data=data,
            keylane=keylane,
            deliver=deliver,
        ),
    )


@cluster_app.add("remove-host", shows=".commands.cluster.delivery:ClusterStep")
def cluster_remove_host(
    *,
    folder: FolderArgument,
    name: HostArgument,
    to: Annotated[
        str,
        Option(
            metavar="HOST",
            help="Move the broker group to this host, as a whole, with all that it stores; a new "
            "host, or one with a broker, which gets a second one.",
            show_default="",
        ),
    ] = "",
    data: Annotated[
        str,
        Option(
            metavar="PATH",
            help="Folder for stored data, with --to.",
            show_default="as of the host's other programs",
        ),
    ] = "",
    keylane: KeylaneOption = "/usr/local/bin/keylane",
    yes: YesOption = False,
    deliver: DeliverOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Move the partitions or the broker group away from a host, and remove its files and its token
    once it has stopped; exit status 1 while something is left to do.
    """
    from .leaving import remove_host

    _run_step(
        output,
        remove_host(folder, name, to=to, data=data, keylane=keylane, yes=yes, deliver=deliver),
    )


@cert_app.add("renew", shows=".commands.cluster.delivery:ClusterStep")
def cert_renew(
    *,
    folder: FolderArgument,
    host: HostsArgument = None,
    every: Annotated[
        bool, Option("--all", help="Also certificates that are valid for 30 days or more.")
    ] = False,
    deliver: DeliverOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Renew the certificates that end within 30 days, and check that servers use them; exit status
    1 while something is left to do.
    """
    from .renewal import renew_certificates

    _run_step(
        output,
        renew_certificates(folder, host or (), every=every, deliver=deliver),
    )


@ca_app.add("rotate", shows=".commands.cluster.delivery:ClusterStep")
def ca_rotate(
    *,
    folder: FolderArgument,
    new: NewOption = False,
    yes: Annotated[
        bool, Option("--yes", "-y", help="Every client has the authorities of DIR/ca.pem.")
    ] = False,
    deliver: DeliverOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """
    Replace the authority in three steps; exit status 1 while something is left to do.

    Servers trust the new authority beside the old one; it signs all certificates; the old one is
    removed. Each step begins once every server uses the files of the step before, and the second
    one with --yes.
    """
    from .renewal import rotate_authority

    _run_step(output, rotate_authority(folder, new=new, yes=yes, deliver=deliver))


@token_app.add("rotate", shows=".commands.cluster.delivery:ClusterStep")
def token_rotate(
    *,
    folder: FolderArgument,
    host: HostsArgument = None,
    new: NewOption = False,
    deliver: DeliverOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """
    Replace the tokens of brokers in three steps; exit status 1 while something is left to do.

    Metaservers know the new token; the broker uses it; metaservers forget the old one. Each step
    begins once every server uses the files of the step before.
    """
    from .renewal import rotate_tokens

    _run_step(output, rotate_tokens(folder, host or (), new=new, deliver=deliver))


for group in (cert_app, ca_app, token_app):
    cluster_app.add_command(group)
