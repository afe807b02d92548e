"""Every variable that the files of `deploy/` name is one that the programs read."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from keylane.cli.main import app
from keylane.rpc.access.token_file import FILE_VARIABLE, VARIABLE
from keylane.rpc.settings import CONFIG_VARIABLE
from keylane.rpc.tls.settings import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from support.hosts.deployed import DEPLOY, SOURCES
from support.server_process import run_keylane

pytestmark = pytest.mark.acceptance

FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
NAME = re.compile(r"KEYLANE_[A-Z0-9_]+")


def variables_of(command: click.Command) -> Iterator[str]:
    """The variables that options of a command, and of those below it, are read from."""
    for parameter in command.params:
        if isinstance(parameter.envvar, str):
            yield parameter.envvar
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from variables_of(command.get_command(context, name))


def known_variables() -> set[str]:
    known = {CONFIG_VARIABLE, CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, FILE_VARIABLE, VARIABLE}
    known |= set(variables_of(app))
    for program, sources in SOURCES.items():
        flags = sources.parser(program, "").parse_args([])
        known |= {f"KEYLANE_{program}_{name}".upper() for name in vars(flags) if name != "config"}
    return known


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(DEPLOY).as_posix())
def test_variables_are_read_by_the_programs(path) -> None:
    assert set(NAME.findall(path.read_text())) <= known_variables()


def test_variables_are_found() -> None:
    """The search finds some, and knows none that nothing reads."""
    named = {name for path in FILES for name in NAME.findall(path.read_text())}
    assert {"KEYLANE_CONFIG", "KEYLANE_META", "KEYLANE_BROKER_RETENTION_MS"} <= named
    assert "KEYLANE_BROKER_RETENTION" not in known_variables()


def test_new_cluster_tells_variables_that_are_read(tmp_path) -> None:
    """It named one for the administrator's token that nothing reads."""
    made = run_keylane("cluster", "init", str(tmp_path / "made"), "--host", "a.example")
    assert made.returncode == 0, made.stderr
    named = set(NAME.findall(made.stdout))
    assert named == {"KEYLANE_TOKEN_FILE", "KEYLANE_TLS_CA", "KEYLANE_META"}
    assert named <= known_variables()
