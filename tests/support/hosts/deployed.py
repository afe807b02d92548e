"""The files of `deploy/`, and the folders of settings that go with them, made by the commands of
its page.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import yaml

from keylane.broker.settings import SOURCES as BROKER_SOURCES
from keylane.metaserver.settings import SOURCES as METASERVER_SOURCES
from support.server_process import run_keylane

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
CONFIG_FOLDER = Path("/etc/keylane")
SOURCES = {"broker": BROKER_SOURCES, "metaserver": METASERVER_SOURCES}
PASSWORD = "a-password"


def documents(name: str) -> list[dict[str, Any]]:
    """The documents of a YAML file."""
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def make_folder(heading: str, folder: Path) -> Path:
    """Run the command `keylane cluster init` of a chapter of the page; returns the folder
    `made`.
    """
    page = (DEPLOY / "README.md").read_text()
    chapter = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    line = re.search(r"^ {4}keylane (cluster init .+)$", chapter, re.MULTILINE)
    assert line, f"no command in the chapter {heading}"
    words = shlex.split(line[1].replace("$password", PASSWORD))
    made = folder / words[2]
    done = run_keylane(*words[:2], str(made), *words[3:])
    assert done.returncode == 0, done.stderr
    return made


def settings_in(folder: Path, command: list[str], environment: dict[str, str]) -> Any:
    """The settings of a server program that is started with this command, with `folder` as its
    folder of settings.
    """
    program, run, *flags = command
    assert run == "run"
    sources = SOURCES[program]
    given = vars(sources.parser(program, "").parse_args(flags))
    config = given.pop("config") or environment.get("KEYLANE_CONFIG")
    assert config, "no settings are named"
    path = folder / Path(config).relative_to(CONFIG_FOLDER)
    others = {name: value for name, value in environment.items() if name != "KEYLANE_CONFIG"}
    assert program in tomllib.loads(path.read_text())
    return sources.read(given, path, others)


def image_environment() -> dict[str, str]:
    """The variables that the image sets for every program in it."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    lines = re.findall(r"^ENV (.+)$", text, re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))
