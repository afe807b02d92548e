"""An archive of a Python environment with keylane and what it needs, as `--archives` of Spark takes
it: for this machine alone.

It is a .tar.gz, because of other archives Spark drops the permission to run the Python.
"""

from __future__ import annotations

import io
import sys
import tarfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
BESIDE = ("numpy", "pyarrow")
SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
LEFT_OUT = {"__pycache__", "tests", "include"}
PACKAGES = ("protocol", "rpc", "arrow", "spark", "producer", "consumer", "admin", "checker")


def pack_environment(path: Path) -> None:
    """Write the archive: a copy of this Python, which finds its library by `home`, and the packages
    as files.
    """
    base = Path(sys.base_prefix, "bin", "python3").resolve()
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        archive.add(base, "bin/python")
        settings = f"home = {base.parent}\ninclude-system-site-packages = false\n".encode()
        entry = tarfile.TarInfo("pyvenv.cfg")
        entry.size = len(settings)
        archive.addfile(entry, io.BytesIO(settings))
        for each in needed():
            for file in each.files or ():
                source = Path(str(each.locate_file(file)))
                if ".." not in file.parts and LEFT_OUT.isdisjoint(file.parts) and source.is_file():
                    archive.add(source, f"{SITE}/{file}")
        for source in (*ROOT.glob("*.py"), *(ROOT / name for name in PACKAGES)):
            archive.add(source, f"{SITE}/keylane/{source.name}", filter=_without_caches)
        archive.add(ROOT / "pyspark_keylane", f"{SITE}/pyspark_keylane", filter=_without_caches)


def needed() -> list[Distribution]:
    """What keylane needs without extras, and what is installed beside it for Spark."""
    left = ["keylane", *BESIDE]
    known: dict[str, Distribution | None] = {"keylane": distribution("keylane")}
    while left:
        name = left.pop()
        if name != "keylane" and name in known:
            continue
        try:
            known[name] = distribution(name)
        except PackageNotFoundError:
            known[name] = None
            continue
        for text in (known[name] or distribution(name)).requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                left.append(wanted.name)
    return [each for name, each in known.items() if each is not None and name != "keylane"]


def _without_caches(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in entry.name else entry
