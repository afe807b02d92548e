"""Profiles: a user's clusters by name, each with an address and the paths of its files.

They are stored in `$XDG_CONFIG_HOME/keylane/profiles.toml`, by default in `~/.config`. Tokens are
never stored, only the paths of their files.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import MappingProxyType

from ..protocol.errors import ConfigError

VARIABLES = MappingProxyType(
    {
        "meta": "KEYLANE_META",
        "token_file": "KEYLANE_TOKEN_FILE",
        "tls_ca": "KEYLANE_TLS_CA",
    }
)
"""Maps each profile field to the environment variable that it sets."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How to connect to a cluster. Fields that are not set are ""."""

    meta: str
    token_file: str = ""
    tls_ca: str = ""


def profiles_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the user's profiles file, which may not exist."""
    base = environment.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(base) / "keylane" / "profiles.toml"


def read_profiles(file: Path) -> dict[str, Profile]:
    """Return the profiles by name. Raises ConfigError if the file cannot be read."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        return {name: Profile(**table) for name, table in tables.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the profiles in {file} cannot be read: {error}") from error


def write_profiles(file: Path, profiles: Mapping[str, Profile]) -> None:
    """Write the file, readable only by its owner. Raises ConfigError if it cannot be written, or if
    a text could not be read back.
    """
    texts = [*profiles, *(value for each in profiles.values() for value in asdict(each).values())]
    if unprintable := [text for text in texts if not text.isprintable()]:
        raise ConfigError(f"a profile takes printable texts only, not {unprintable[0]!r:.80}")
    lines: list[str] = []
    for name, profile in sorted(profiles.items()):
        lines.append(f"[{json.dumps(name, ensure_ascii=False)}]")
        lines += [
            f"{key} = {json.dumps(value, ensure_ascii=False)}"
            for key, value in asdict(profile).items()
            if value
        ]
        lines.append("")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as temporary:
            temporary.write("\n".join(lines))
        os.replace(temporary.name, file)
    except OSError as error:
        raise ConfigError(f"the profiles in {file} cannot be written: {error.strerror}") from error


def use_profile(name: str) -> None:
    """
    Set this process's environment variables from a profile. Variables that the profile does not
    define are unset, as is KEYLANE_TOKEN, so that no token is sent to another cluster.

    Raises:
        ConfigError: there is no such profile.
    """
    profiles = read_profiles(profiles_file())
    if name not in profiles:
        names = ", ".join(sorted(profiles)) or "none"
        raise ConfigError(
            f"there is no profile {name!r} in {profiles_file()}; profiles: {names}. "
            f"keylane profile add {name} --meta HOST:PORT makes one"
        )
    os.environ.pop("KEYLANE_TOKEN", None)
    for key, value in asdict(profiles[name]).items():
        if value:
            os.environ[VARIABLES[key]] = value
        else:
            os.environ.pop(VARIABLES[key], None)
