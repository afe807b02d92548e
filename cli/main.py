"""The `keylane` command line: command groups and top-level commands.

Large modules are imported only when a command runs, which keeps `keylane --help` fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from ..protocol.address import META_DEFAULT
from ..protocol.copies import COPIES_MAX
from ..protocol.limits import TTL_MS_MAX, TTL_MS_MIN
from .answer import CommonOptions, expand_options
from .completion import complete_group, complete_profile, complete_subject
from .completion_scripts import install_completion, show_completion
from .groups import LazyGroup, PeerCommandGroup
from .options import (
    BROKERS_MAX,
    ROWS_MIN,
    ROWS_TOTAL,
    WAIT_S,
    CountOption,
    DelayOption,
    DeliverAtOption,
    FileOption,
    FormatOption,
    HeaderOption,
    KeyFieldOption,
    KeylessOption,
    MetaOption,
    OutputFormat,
    OutputOption,
    SubjectArgument,
    TagOption,
)
from .parameters import Argument, Option
from .usage import run_command_line


def _show_version() -> None:
    from importlib.metadata import version

    print(f"keylane {version('keylane')}")


def _keylane(
    *,
    version: Annotated[
        bool, Option("--version", at_once=_show_version, help="Show the version and exit.")
    ] = False,
    profile: Annotated[
        str | None,
        Option(
            "--profile",
            "-p",
            envvar="KEYLANE_PROFILE",
            metavar="NAME",
            complete=complete_profile,
            help="Cluster to use, made with `keylane profile add`; it comes before KEYLANE_META.",
        ),
    ] = None,
    wait_s: Annotated[
        float,
        Option(
            envvar="KEYLANE_WAIT_S",
            min=0,
            max=86_400,
            metavar="SECONDS",
            help="How long every command waits for a metaserver that is starting.",
        ),
    ] = 0,
    install_completion: Annotated[
        bool,
        Option(
            "--install-completion",
            at_once=install_completion,
            help="Install completion for the shell in use.",
        ),
    ] = False,
    show_completion: Annotated[
        bool,
        Option(
            "--show-completion",
            at_once=show_completion,
            help="Print the completion script of the shell in use.",
        ),
    ] = False,
) -> None:
    """A message broker for Python that keeps the order of each key."""
    WAIT_S.set(wait_s)
    if profile:
        from .profiles import use_profile

        use_profile(profile)


app = PeerCommandGroup.of("keylane", _keylane)


for _name, (_module, _group, _help) in {
    "subject": (
        "subject.app",
        "subject_app",
        "Create, list, describe and delete subjects, and change their partitions.",
    ),
    "group": (
        "group",
        "group_app",
        "Inspect, create and delete consumer groups, set their policy and progress, suspend them.",
    ),
    "queue": (
        "queue",
        "queue_app",
        "Read and inspect the logic queues of static subjects.",
    ),
    "broker": (
        "broker.app",
        "broker_app",
        "Inspect brokers, take them out of use, check their data folders.",
    ),
    "cluster": (
        "cluster.app",
        "cluster_app",
        "Write files for the hosts of a new cluster; check a running one.",
    ),
    "meta": (
        "meta",
        "meta_app",
        "Maintain the metaserver's database.",
    ),
    "metaserver": (
        "programs",
        "metaserver_app",
        "Run a metaserver.",
    ),
    "config": (
        "programs",
        "config_app",
        "The settings of the server programs.",
    ),
    "outbox": (
        "outbox",
        "outbox_app",
        "Inspect the outbox in a user's database, and rows that failed.",
    ),
    "scheduled": (
        "scheduled",
        "scheduled_app",
        "List and cancel messages that brokers keep for a later delivery.",
    ),
    "parked": (
        "parked.app",
        "parked_app",
        "Inspect messages that a consumer group has set aside; redrive, edit or skip them.",
    ),
    "dead": (
        "parked.app",
        "dead_app",
        "Inspect messages that a consumer group gave up; have them handled again, edit or skip.",
    ),
    "spark": (
        "spark.app",
        "spark_app",
        "Work on subjects with Spark.",
    ),
    "observe": (
        "observe.app",
        "observe_app",
        "Print rules for Prometheus and a board for Grafana.",
    ),
    "access": (
        "access",
        "access_app",
        "Manage tokens, rights and quotas.",
    ),
    "debug": (
        "debug.app",
        "debug_app",
        "Write what others need to help you into one file.",
    ),
    "profile": (
        "profile",
        "profile_app",
        "Name clusters, and use one with -p NAME.",
    ),
}.items():
    app.add_command(LazyGroup(_name, (_module, _group), _help))


@app.add(shows=".commands.dev:DevCluster")
def dev(
    data: Annotated[Path, Option(help="Folder for everything stored.")] = Path("keylane-data"),
    port: Annotated[
        int,
        Option(
            help="Port of the metaserver, up to 65535; brokers use the next ones. 0: any free port."
        ),
    ] = 7000,
    brokers: Annotated[
        int | None,
        Option(
            min=1,
            max=BROKERS_MAX,
            help="Number of broker groups.",
            show_default="2, or as many as the folder has",
        ),
    ] = None,
    *,
    copies: Annotated[
        int,
        Option(
            min=1,
            max=COPIES_MAX,
            help="Data folders of each broker group, all on this machine; acks wait for each.",
        ),
    ] = 1,
    subject: Annotated[
        list[str] | None,
        Option(help="Create this subject too; may be repeated.", complete=complete_subject),
    ] = None,
    auto_create: Annotated[
        str,
        Option(
            metavar="PATTERN",
            help="Subjects that are created by their first message: '*', 'events.*'.",
        ),
    ] = "off",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Run a whole cluster on this machine, until Ctrl-C."""
    from .commands.dev import run_dev

    status = run_dev(
        output,
        data=data,
        port=port,
        brokers=brokers,
        copies=copies,
        subjects=subject or [],
        auto_create=auto_create,
    )
    raise click.exceptions.Exit(status)


@app.add(shows=".commands.wait:ReadyServers")
@expand_options
def wait(
    brokers: Annotated[
        int, Option(min=0, help="Number of broker groups that must be available.")
    ] = 1,
    timeout: Annotated[
        float,
        Option(min=0.1, max=86_400, metavar="SECONDS", help="Give up after this time."),
    ] = 60,
    *,
    common: CommonOptions,
) -> None:
    """Wait until a metaserver is ready and enough broker groups are available; exit status 1 after
    the timeout.
    """
    from .commands.wait import wait_for_servers

    common.run(wait_for_servers, brokers=brokers, timeout_s=timeout)


@app.add(shows="..admin:Explanation")
@expand_options
def why(
    subject: SubjectArgument,
    *,
    group: Annotated[
        str | None,
        Option(
            "--group",
            "-g",
            help="Consumer group; without it, each of the subject.",
            complete=complete_group,
        ),
    ] = None,
    key: Annotated[
        str | None, Option("--key", "-k", help="Order key of the messages in question.")
    ] = None,
    key_hex: Annotated[
        str | None, Option(metavar="HEX", help="The order key, in hexadecimal.")
    ] = None,
    common: CommonOptions,
) -> None:
    """Say why messages do not arrive at a consumer group, and what to do."""
    from .commands.why import show_why

    common.run(show_why, subject=subject, group=group, key=key, key_hex=key_hex)


@app.add()
def top(*, meta: MetaOption = META_DEFAULT) -> None:
    """Show live on a terminal what is wrong, and brokers, groups and subjects with their rates."""
    from .commands.top import show_top
    from .connection import import_network
    from .screen import run

    import_network()
    run(OutputFormat.TABLE, show_top(meta))


@app.add(shows=".demo.report:Result")
def demo(
    rows: Annotated[
        int,
        Option(min=ROWS_MIN, max=ROWS_TOTAL, help="Number of flights."),
    ] = ROWS_TOTAL,
    keep: Annotated[bool, Option("--keep", help="Leave the cluster running.")] = False,
    data: Annotated[
        Path | None,
        Option(
            help="New or empty folder for everything stored.",
            show_default="a temporary one, removed if all is well",
        ),
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Run the main job on real flights: kill a consumer, kill a broker, read with Spark, check
    everything.
    """
    from .demo.run import run_demo

    raise click.exceptions.Exit(run_demo(output, rows=rows, keep=keep, data=data))


@app.add(
    shows=".commands.produce:InputLine ..protocol.message:Receipt "
    "..protocol.scheduled.receipt:ScheduledReceipt"
)
@expand_options
def produce(
    *,
    subject: SubjectArgument,
    value: Annotated[
        str | None, Argument(help="The message. Without it: one message per line of input.")
    ] = None,
    key: Annotated[str | None, Option("--key", "-k", help="Order key.")] = None,
    key_separator: Annotated[
        str | None,
        Option(help=r"Text between key and value in a line; \t is a tab, \xNN a byte."),
    ] = None,
    key_field: KeyFieldOption = None,
    keyless: KeylessOption = False,
    header: HeaderOption = None,
    deliver_at: DeliverAtOption = None,
    delay: DelayOption = None,
    file: FileOption = None,
    format: FormatOption = None,  # noqa: A002 - the option's name
    lines: Annotated[
        str | None,
        Option(help="Send only these lines, numbered from 1, such as 3,7-9,26386-."),
    ] = None,
    common: CommonOptions,
) -> None:
    """Send one message, or the lines of standard input, or the lines or rows of a file."""
    from .commands.produce import SendOptions
    from .commands.produce import produce as run_produce

    options = SendOptions(
        subject=subject,
        value=value,
        key=key,
        separator=key_separator,
        keyless=keyless,
        lines=lines,
        file=file,
        format=format,
        key_field=key_field,
        headers=header or (),
        deliver_at=deliver_at,
        delay_s=delay,
    )
    common.run(run_produce, options)


@app.add(shows=".message_json:MessageFields")
@expand_options
def consume(
    *,
    subject: SubjectArgument,
    group: Annotated[
        str, Option("--group", "-g", help="Consumer group to join.", complete=complete_group)
    ],
    count: CountOption = None,
    idle: Annotated[
        float | None, Option(min=0.1, help="Stop after this many seconds without a message.")
    ] = None,
    ttl_ms: Annotated[
        int,
        Option(
            min=TTL_MS_MIN,
            max=TTL_MS_MAX,
            help="Milliseconds after which the group considers this consumer dead.",
        ),
    ] = 10_000,
    shared: Annotated[
        bool,
        Option(
            "--shared",
            help="Share every partition with the other consumers of the group, without order.",
        ),
    ] = False,
    tag: TagOption = None,
    common: CommonOptions,
) -> None:
    """Print messages as a member of a group; each is acked after it is printed."""
    from .commands.consume import consume as run_consume

    common.run(
        run_consume,
        subject=subject,
        group=group,
        count=count,
        idle_s=idle,
        ttl_ms=ttl_ms,
        shared=shared,
        tags=tag,
    )


@app.add(shows=".message_json:MessageFields")
@expand_options
def read(
    *,
    subject: SubjectArgument,
    start: Annotated[
        str,
        Option(
            "--from",
            metavar="earliest|latest|AGO|TIME|OFFSET",
            help="AGO is -1h, -15m, -2d; TIME is ISO 8601, UTC without a zone; an offset needs "
            "--partition.",
        ),
    ] = "earliest",
    stop: Annotated[
        str | None,
        Option(
            "--to",
            metavar="latest|AGO|TIME|OFFSET",
            help="The first message that is not printed.  [default: the current end]",
        ),
    ] = None,
    key: Annotated[
        str | None, Option(help="Only messages of this order key, in its order.")
    ] = None,
    key_hex: Annotated[
        str | None, Option(metavar="HEX", help="Only this order key, in hexadecimal.")
    ] = None,
    tag: TagOption = None,
    partition: Annotated[int | None, Option(min=1, help="Only the partition with this id.")] = None,
    count: CountOption = None,
    follow: Annotated[
        bool, Option("--follow", "-f", help="Continue with messages that are stored later.")
    ] = False,
    from_copies: Annotated[
        bool,
        Option(
            "--from-copies",
            help="Read from copies that serve reads, and from brokers only what these lack.",
        ),
    ] = False,
    common: CommonOptions,
) -> None:
    """Print messages of a subject by time, offset and key; no group, no lock, no acks.

    While a broker is away, those of the others are printed, and the exit status is 1.
    """
    from .commands.parked.selection import named_key
    from .commands.read import read_subject

    common.run(
        read_subject,
        subject,
        start=start,
        stop=stop,
        key=named_key(key, key_hex),
        tags=tag,
        partition=partition,
        limit=count,
        follow=follow,
        from_copies=from_copies,
    )


def main() -> None:
    """Run the command line and exit with its status."""
    run_command_line(app, "keylane")
