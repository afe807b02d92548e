"""`keylane why`: why messages of a subject do not arrive at a consumer group."""

from __future__ import annotations

from ...admin import Explanation
from ...protocol.text import printable, sentence
from ...rpc.connections import gather_limited
from ..connection import open_admin
from ..options import OutputFormat
from ..screen import show_data, show_line
from ..status import showing
from .parked.selection import key_text, named_key

GROUPS_MAX = 20
"""How many groups are explained if none is named."""


async def show_why(
    meta: str,
    output: OutputFormat,
    *,
    subject: str,
    group: str | None,
    key: str | None,
    key_hex: str | None,
) -> None:
    """
    Show why messages do not arrive: at one group, or at each group of the subject.

    Raises:
        ConfigError: the key is given twice, or is not hexadecimal.
        SubjectUnknownError, GroupUnknownError
    """
    named = named_key(key, key_hex)
    with showing(f"asking the brokers of {subject}"):
        async with open_admin(meta) as admin:
            groups = (
                [each.group for each in await admin.list_groups(subject)]
                if group is None
                else [group]
            )
            found = await gather_limited(
                lambda each: admin.why(subject, each, key=named), groups[:GROUPS_MAX]
            )
    if output is not OutputFormat.TABLE:
        show_data(output, found)
        return
    if not groups:
        show_line(
            f"No consumer group reads {subject}: start a consumer, or keylane group create "
            f"{subject} GROUP"
        )
    for number, explanation in enumerate(found):
        if number:
            show_line("")
        for line in lines_of(explanation):
            show_line(line)
    if len(groups) > GROUPS_MAX:
        show_line(f"{len(groups) - GROUPS_MAX} more groups: --group NAME")


def lines_of(explanation: Explanation) -> list[str]:
    """Return the causes as lines, the most likely one first, each with its next step."""
    about = f"{explanation.group} on {explanation.subject}"
    if explanation.key is not None:
        about += f", key {printable(key_text(explanation.key))}"
    lines = [f"{about}:"]
    for number, cause in enumerate(explanation.causes, start=1):
        lines += [f"  {number}. {sentence(cause.text)}", f"     → {cause.step}"]
    if explanation.unknown:
        lines.append("  Not known:")
        lines += [f"  - {sentence(text)}" for text in explanation.unknown]
    return lines
