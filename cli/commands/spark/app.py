"""`keylane spark`: the options and help of its command."""

from __future__ import annotations

import enum
from typing import Annotated

import click

from ....protocol.limits import PARTITIONS_MAX
from ...answer import CommonOptions, expand_options
from ...completion import complete_subject
from ...groups import CommandGroup
from ...parameters import Option

spark_app = CommandGroup()


class OnError(enum.StrEnum):
    """What to do with a message for which the function of a job fails."""

    FAIL = "fail"
    PARK = "park"


FolderOption = Annotated[
    str,
    Option(metavar="DIR", help="With --target SUBJECT: folder for the plan and the manifest."),
]
HiddenOption = Annotated[
    str,
    Option(
        metavar="NAME",
        help="With --target SUBJECT: leave the rows in this hidden subject, to be published later. "
        "If the subject is the source, it is sealed first and continued, for a cut-over.",
    ),
]
AcceptOption = Annotated[
    bool,
    Option(
        "--accept-code",
        help="Continue although the code has changed: finished pieces are kept, and the manifest "
        "records the code of each.",
    ),
]
VersionOption = Annotated[
    str,
    Option(
        metavar="VERSION",
        help="Version of everything outside the job's modules, such as packages and files; another "
        "version counts as other code.",
    ),
]
OnErrorOption = Annotated[
    OnError,
    Option(
        help="If the function fails for a message: fail the job, or park the message in the "
        "folder.",
    ),
]
PartitionsOption = Annotated[
    int,
    Option(
        min=0,
        max=PARTITIONS_MAX,
        help="With --target SUBJECT: create it with this many partitions if it does not exist.",
    ),
]


@spark_app.add(
    "reprocess",
    shows="..protocol.reprocess.manifest:Manifest .commands.spark.reprocess:PlanFields "
    ".commands.spark.reprocess:DifferenceFields",
)
@expand_options
def spark_reprocess(
    *,
    source: Annotated[
        str,
        Option(
            "--source",
            metavar="SUBJECT",
            help="The subject to reprocess.",
            complete=complete_subject,
        ),
    ],
    to: Annotated[
        str,
        Option(
            "--target",
            metavar="parquet:DIR|SUBJECT",
            help="Where the rows go: files with a manifest, or a subject, in which all of them "
            "appear at once.",
        ),
    ],
    job: Annotated[
        str,
        Option(
            metavar="MODULE:FUNCTION",
            help="A function that takes a pyarrow.Table of messages in order, and returns one.",
        ),
    ],
    start: Annotated[
        str, Option(help="Where it begins; see the option `start` of the reader.")
    ] = "earliest",
    end: Annotated[
        str, Option(help="Where it ends; see the option `end` of the reader.")
    ] = "latest",
    name: Annotated[
        str,
        Option(help="Name of the job, in each row and hold.", show_default="module.function"),
    ] = "",
    plan: Annotated[
        bool, Option("--plan", help="Show what would be done, and do nothing.")
    ] = False,
    compare: Annotated[
        str,
        Option(
            metavar="DIR|subject:NAME",
            help="At the end, show where the rows differ from those of an earlier job's folder or "
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
        Option(
            min=0,
            max=86_400,
            help="Seconds for which messages after the end are protected, for a group that starts "
            "there.",
        ),
    ] = 3_600,
    common: CommonOptions,
) -> None:
    """
    Reprocess a subject with a function; run it again to finish what is missing.

    The exit status is 0, 1 after an error, 2 if compared outputs differ, 3 if messages are parked.
    """
    from .reprocess import ReprocessOptions, reprocess

    options = ReprocessOptions(
        meta=common.meta,
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
    raise click.exceptions.Exit(reprocess(common.output, options))
