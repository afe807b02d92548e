"""An environment in which no Java is found but the one that a Python package carries."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def path_without_java(folder: Path) -> str:
    """A PATH with what Spark's scripts call, and no `java`."""
    folder.mkdir()
    for name in ("bash", "sh", "dirname", "basename", "uname", "ps", "nohup", "readlink", "sed"):
        if program := shutil.which(name):
            (folder / name).symlink_to(program)
    return str(folder)


def environment_without_java(folder: Path) -> dict[str, str]:
    """Our environment with `folder` as its home, no Java, and nothing that another Spark has
    set.
    """
    environment = dict(os.environ, PATH=path_without_java(folder / "bin"), HOME=str(folder))
    for name in ("JAVA_HOME", "XDG_CACHE_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        environment.pop(name, None)
    return environment
