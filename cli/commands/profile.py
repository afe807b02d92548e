"""`keylane profile`: names for clusters, used as `keylane -p NAME …`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypedDict

from ...protocol.address import parse_addresses
from ...protocol.errors import ConfigError
from ...protocol.text import counted
from ..completion import complete_profile
from ..groups import CommandGroup
from ..options import OutputFormat, OutputOption
from ..parameters import Argument, Option
from ..profiles import Profile, profiles_file, read_profiles, write_profiles
from ..screen import make_table, show_data, show_line, show_table

profile_app = CommandGroup()
NameArgument = Annotated[
    str,
    Argument(metavar="NAME", help="Name of the profile.", complete=complete_profile),
]


class NamedProfile(TypedDict):
    """A profile with its name, as JSON."""

    name: str
    meta: str
    token_file: str
    tls_ca: str


@profile_app.add("add", shows=".commands.profile:NamedProfile")
def profile_add(
    name: NameArgument,
    meta: Annotated[
        str,
        Option(metavar="HOST:PORT", help="Address of the metaserver; several with commas."),
    ],
    token_file: Annotated[
        Path | None, Option(metavar="FILE", help="File with the token, which is not copied.")
    ] = None,
    tls_ca: Annotated[
        Path | None, Option(metavar="FILE", help="Certificate authority of the servers.")
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Add a profile, or replace the one with this name."""
    parse_addresses(meta)
    for path in filter(None, (token_file, tls_ca)):
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{path} cannot be read")
    file = profiles_file()
    paths = ["" if path is None else str(path.absolute()) for path in (token_file, tls_ca)]
    profile = Profile(meta, *paths)
    write_profiles(file, {**read_profiles(file), name: profile})
    if output is not OutputFormat.TABLE:
        show_data(output, _fields(name, profile))
        return
    show_line(f"keylane -p {name} uses {meta}; the profile is in {file}")


@profile_app.add("list", shows=".commands.profile:NamedProfile")
def profile_list(output: OutputOption = OutputFormat.TABLE) -> None:
    """Show the profiles."""
    profiles = sorted(read_profiles(profiles_file()).items())
    if output is not OutputFormat.TABLE:
        show_data(output, [_fields(name, profile) for name, profile in profiles])
        return
    if not profiles:
        show_line("no profiles; add one with: keylane profile add NAME --meta HOST:PORT")
        return
    rows = [(name, each.meta, each.token_file, each.tls_ca) for name, each in profiles]
    show_table(
        make_table(
            counted(len(rows), "profile"), ("name", "metaserver", "token file", "authority"), rows
        )
    )


@profile_app.add("remove", shows=".commands.profile:NamedProfile")
def profile_remove(name: NameArgument, output: OutputOption = OutputFormat.TABLE) -> None:
    """Remove a profile."""
    file = profiles_file()
    profiles = read_profiles(file)
    profile = profiles.pop(name, None)
    if profile is None:
        raise ConfigError(f"there is no profile {name!r} in {file}")
    write_profiles(file, profiles)
    if output is not OutputFormat.TABLE:
        show_data(output, _fields(name, profile))
        return
    show_line(f"removed the profile {name}")


def _fields(name: str, profile: Profile) -> NamedProfile:
    return {
        "name": name,
        "meta": profile.meta,
        "token_file": profile.token_file,
        "tls_ca": profile.tls_ca,
    }
