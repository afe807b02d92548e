"""Names of subjects and consumer groups are completed wherever a command takes one."""

from __future__ import annotations

from collections.abc import Iterator

import click

from keylane.cli.completion import complete_group, complete_subject
from keylane.cli.main import app

BROKER_GROUPS = {
    "subject move": "to",
    "subject evacuate": "group",
    "broker cordon": "group",
    "broker uncordon": "group",
    "broker evacuate": "group",
    "broker accept": "group",
    "broker copies": "group",
    "broker forget": "group",
    "broker hand-over": "group",
    "meta rebuild": "gone",
    "cluster add-host": "copy_of",
    "cluster balance": "exclude",
}
"""Parameters that are called GROUP and take the name of a broker group, which is not completed."""
COMPLETERS = {"subject": complete_subject, "group": complete_group}


def named_parameters(group: click.Group, *path: str) -> Iterator[tuple[str, str, click.Parameter]]:
    """Yield (command, what it names, parameter) for all parameters that name a subject or group."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from named_parameters(command, *path, name)
            continue
        for parameter in command.params:
            is_flag = isinstance(parameter, click.Option) and parameter.is_flag
            for named in COMPLETERS:
                names = {str(parameter.name), *(each.lstrip("-") for each in parameter.opts)}
                if not is_flag and (named in names or parameter.metavar == named.upper()):
                    yield " ".join((*path, name)), named, parameter


def test_every_parameter_that_names_a_subject_or_a_consumer_group_is_completed():
    """Arguments and options alike; the names of broker groups alone are typed out."""
    found = list(named_parameters(app))
    assert len(found) > 60
    typed = {
        command: parameter.name
        for command, named, parameter in found
        if parameter._custom_shell_complete is not COMPLETERS[named]
    }
    assert typed == BROKER_GROUPS
