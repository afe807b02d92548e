"""`keylane meta`: look after the metaserver's database: verify, rebuild, migrate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...protocol.address import addresses_of
from ...protocol.text import counted
from ...protocol.verification import Verification
from ..connection import connect
from ..options import META_DEFAULT, MetaOption, OutputFormat, OutputOption
from ..screen import make_table, run, show_json, show_line, show_table

if TYPE_CHECKING:
    from ...metaserver.settings import MetaserverSettings

meta_app = typer.Typer(no_args_is_help=True, help="Look after the metaserver's database.")
DataOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of the embedded database.")
]
UrlOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="postgresql+asyncpg://…, instead of the embedded one."),
]


@meta_app.command("verify")
def meta_verify(meta: MetaOption = META_DEFAULT, output: OutputOption = OutputFormat.TABLE) -> None:
    """Compare the database with the brokers: thirteen checks; exit status 1 if one does not hold."""
    answers: list[bool] = []

    async def work() -> None:
        answers.append(await verify_cluster(meta, output))

    run(output, work())
    if not all(answers):
        raise typer.Exit(1)


@meta_app.command("rebuild")
def meta_rebuild(
    *,
    broker: Annotated[
        list[str], typer.Option(metavar="HOST:PORT", help="A broker; repeat it for every one.")
    ],
    data: DataOption = None,
    database_url: UrlOption = None,
    complete: Annotated[
        bool,
        typer.Option(
            "--complete",
            help="These are all brokers: go on with the creation of subjects of which some "
            "partitions are on none, and which nobody has used.",
        ),
    ] = False,
    gone: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GROUP", help="A broker group that exists no more; repeat it for every one."
        ),
    ] = None,
    lose_unread: Annotated[
        bool,
        typer.Option(
            "--lose-unread",
            help="Give up what consumer groups may not have read on broker groups that are gone.",
        ),
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Fill an empty database with what the brokers keep: routes, groups, tokens.  Then start the metaserver."""
    given = _settings(data, database_url)
    word = {"complete": complete, "gone": gone or [], "lose_unread": lose_unread}
    run(output, rebuild(given, output, brokers=broker, word=word))


@meta_app.command("migrate")
def meta_migrate(
    data: DataOption = None,
    database_url: UrlOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Bring the database's schema up to date.  A metaserver does the same when it starts."""
    run(output, migrate(_settings(data, database_url), output))


def _settings(data: Path | None, database_url: str | None) -> dict[str, Any]:
    """What was given; a database on a server needs no folder of its own."""
    if data is None and database_url is not None:
        data = Path()
    return {"data": data, "database_url": database_url}


def _checked(given: dict[str, Any]) -> MetaserverSettings:
    from ...metaserver.settings import read_settings

    return read_settings(given)


async def rebuild(
    given: dict[str, Any], form: OutputFormat, *, brokers: list[str], word: dict[str, Any]
) -> None:
    """Rebuild a database and show what is in it now, and what is not.  Raises KeylaneError."""
    from ...metaserver.rebuild.rows import Word
    from ...metaserver.rebuild.service import rebuild_database
    from ...rpc.http_network import HttpNetwork

    addresses = [one for text in brokers for one in addresses_of(text)]
    network = HttpNetwork()
    try:
        cluster = await rebuild_database(_checked(given), network, addresses, word=Word(**word))
    finally:
        await network.close()
    found: list[dict[str, Any]] = [
        {
            "subject": one.name,
            "order_strategy": one.order_strategy,
            "partitions": len(one.partitions),
            "groups": [{"group": each.name, "last_token": each.last_token} for each in one.groups],
            "operation": next(
                (each.state for each in (one.operation, *one.fences) if each is not None), None
            ),
            "gone": [
                {"partition_id": each.partition.partition_id, "unread_by": list(each.unread_by)}
                for each in one.gone
            ],
        }
        for one in cluster.subjects
    ]
    for one in found:
        for gone in one["gone"]:
            unread = ", ".join(gone["unread_by"])
            show_line(
                f"partition {gone['partition_id']} of {one['subject']!r} is gone, with whatever was in it"
                + (f"; perhaps not read by {unread}" if unread else ""),
                errors=True,
            )
    cordons = "cordons are not kept by brokers: keylane broker cordon GROUP"
    if form is OutputFormat.JSON:
        show_json(found)
        show_line(cordons, errors=True)
        return
    rows = [
        (
            one["subject"],
            one["order_strategy"],
            one["partitions"],
            len(one["groups"]),
            one["operation"],
        )
        for one in found
    ]
    columns = ("subject", "strategy", "partitions#", "groups#", "goes on")
    show_table(make_table(f"rebuilt from {counted(len(addresses), 'broker')}", columns, rows))
    show_line(cordons)


async def migrate(given: dict[str, Any], form: OutputFormat) -> None:
    """Bring a schema up to date and say where it is.  Raises KeylaneError."""
    from ...metaserver.settings import machine_boot, prepare_folder
    from ...metaserver.sql.database import open_database
    from ...metaserver.sql.migrate import HEAD
    from ...protocol.clock import SystemClock

    settings = _checked(given)
    async with open_database(
        folder=prepare_folder(settings.data),
        url=settings.database_url,
        clock=SystemClock(),
        boot=machine_boot(),
        broker_ttl_ms=settings.broker_ttl_ms,
    ) as database:
        name = database.name
    if form is OutputFormat.JSON:
        show_json({"database": name, "revision": HEAD})
    else:
        show_line(f"{name}: the schema is at revision {HEAD}")


async def verify_cluster(meta: str, form: OutputFormat) -> bool:
    """Show thirteen checks between the metaserver's database and the brokers; True if all of them hold."""
    async with connect(meta) as (client, _network):
        found = await client.verify()
    if form is OutputFormat.JSON:
        show_json(found)
    else:
        show_verification(found)
    return found.ok


def show_verification(found: Verification) -> None:
    """A line for each check, and below it where it does not hold."""
    rows = [
        (
            one.code,
            one.name,
            counted(one.violations_total, "violation") if one.violations_total else "ok",
            one.claim,
        )
        for one in found.checks
    ]
    title = (
        "the database and the brokers agree" if found.ok else "the database and the brokers differ"
    )
    show_table(make_table(title, ("check", "name", "result", "claim"), rows))
    for one in found.checks:
        for violation in one.violations:
            show_line(f"{one.code} {one.name}: {violation}")
        if one.violations_total > len(one.violations):
            show_line(
                f"{one.code} {one.name}: … and {one.violations_total - len(one.violations)} more"
            )
