"""`keylane spark`: the options and help of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from ....protocol.limits import PARTITIONS_MAX
from ...options import META_DEFAULT, MetaOption, OutputFormat, OutputOption

spark_app = typer.Typer(no_args_is_help=True, help="Work on subjects with Spark.")

FolderOption = Annotated[
    str,
    typer.Option(metavar="DIR", help="With --to SUBJECT: where plan and manifest are kept."),
]
HiddenOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="With --to SUBJECT: leave the rows in this hidden subject, to be published later. With --to the source itself it "
        "is sealed first and continued, for a cut-over.",
    ),
]
PartitionsOption = Annotated[
    int,
    typer.Option(
        min=0, max=PARTITIONS_MAX, help="With --to SUBJECT: of a subject that does not exist."
    ),
]


@spark_app.command("reprocess")
def spark_reprocess(
    *,
    source: Annotated[str, typer.Option("--from", metavar="SUBJECT", help="What is reprocessed.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="parquet:DIR|SUBJECT",
            help="Where the rows go: files with a manifest, or a subject, which has all of them at once or none.",
        ),
    ],
    job: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A function that takes a pyarrow.Table of messages in order, and returns one.",
        ),
    ],
    start: Annotated[
        str, typer.Option(help="Where it begins, as the option `start` of the reader.")
    ] = "earliest",
    end: Annotated[
        str, typer.Option(help="Where it ends, as the option `end` of the reader.")
    ] = "latest",
    name: Annotated[
        str,
        typer.Option(help="Name of the job, in each row and hold.", show_default="module.function"),
    ] = "",
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what would be done, and do nothing.")
    ] = False,
    compare: Annotated[
        str,
        typer.Option(
            metavar="DIR|subject:NAME",
            help="Afterwards show where the rows differ from those of an earlier job's folder, or of a subject.",
        ),
    ] = "",
    folder: FolderOption = "",
    hidden: HiddenOption = "",
    partitions: PartitionsOption = 0,
    handover_s: Annotated[
        int,
        typer.Option(
            min=0,
            max=86_400,
            help="How long messages behind the end are held for a group to begin there.",
        ),
    ] = 3_600,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Reprocess a subject by a function; run again, it finishes what is missing or does nothing."""
    from .reprocess import Asked, reprocess

    asked = Asked(
        meta=meta, source=source, to=to, job=job, start=start, end=end, name=name, plan=plan,
        compare=compare, handover_ms=handover_s * 1000, folder=folder, hidden=hidden, partitions=partitions,
    )  # fmt: skip
    raise typer.Exit(reprocess(output, asked))
