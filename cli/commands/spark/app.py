"""`keylane spark`: the options and help of its commands."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from ....protocol.limits import PARTITIONS_MAX
from ...answer import Answer, expanded

spark_app = typer.Typer(no_args_is_help=True, help="Work on subjects with Spark.")


class OnError(enum.StrEnum):
    """What becomes of a message for which the function of a job fails."""

    FAIL = "fail"
    PARK = "park"


FolderOption = Annotated[
    str,
    typer.Option(metavar="DIR", help="With --to SUBJECT: where plan and manifest are kept."),
]
HiddenOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="With --to SUBJECT: leave the rows in this hidden subject, to be published later. "
        "With --to the source itself it "
        "is sealed first and continued, for a cut-over.",
    ),
]
AcceptOption = Annotated[
    bool,
    typer.Option(
        "--accept-code",
        help="Go on where the code has changed: pieces that are done stay, and say their code in "
        "the manifest.",
    ),
]
VersionOption = Annotated[
    str,
    typer.Option(
        metavar="VERSION",
        help="Of what the code is besides its modules, as packages and files: "
        "another one is other code.",
    ),
]
OnErrorOption = Annotated[
    OnError,
    typer.Option(
        help="What becomes of a message for which the function fails: the job ends, or it is "
        "parked in the folder.",
    ),
]
PartitionsOption = Annotated[
    int,
    typer.Option(
        min=0, max=PARTITIONS_MAX, help="With --to SUBJECT: of a subject that does not exist."
    ),
]


@spark_app.command("reprocess")
@expanded
def spark_reprocess(
    *,
    source: Annotated[str, typer.Option("--from", metavar="SUBJECT", help="What is reprocessed.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="parquet:DIR|SUBJECT",
            help="Where the rows go: files with a manifest, or a subject, which has all of them at "
            "once or none.",
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
            help="Afterwards show where the rows differ from those of an earlier job's folder, or "
            "of a subject.",
        ),
    ] = "",
    folder: FolderOption = "",
    hidden: HiddenOption = "",
    partitions: PartitionsOption = 0,
    accept_code: AcceptOption = False,
    code_version: VersionOption = "",
    on_error: OnErrorOption = OnError.FAIL,
    handover_s: Annotated[
        int,
        typer.Option(
            min=0,
            max=86_400,
            help="How long messages behind the end are held for a group to begin there.",
        ),
    ] = 3_600,
    answer: Answer,
) -> None:
    """
    Reprocess a subject by a function; run again, it finishes what is missing or does nothing.

    The exit status is 0, 1 after an error, 2 if outputs that are compared differ, 3 if messages are
    parked.
    """
    from .reprocess import Asked, reprocess

    asked = Asked(
        meta=answer.meta,
        source=source,
        to=to,
        job=job,
        start=start,
        end=end,
        name=name,
        plan=plan,
        compare=compare,
        handover_ms=handover_s * 1000,
        folder=folder,
        hidden=hidden,
        partitions=partitions,
        accept_code=accept_code,
        code_version=code_version,
        park=on_error is OnError.PARK,
    )
    raise typer.Exit(reprocess(answer.output, asked))
