"""keylane of several versions: copies of this tree under other version numbers, each in a folder of
its own.

A version has a tag once it is released; until then this tree stands for it under its number. 0.2.0
is the first release, so an upgrade begins at this tree's version. The later ones have a migration
more, which adds a table and a column.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from keylane.metaserver.sql.migrate import HEAD
from keylane.protocol.membership.versions import OWN

ROOT = Path(__file__).resolve().parents[2]
VERSIONED = ("__init__.py", "protocol/membership/versions.py")
LEFT_OUT = (".*", "tests", "docs", "benchmarks", "examples", "build", "dist")
NUMBER = re.compile(r'^((?:__version__|VERSION|version) = )"[^"]+"$', re.MULTILINE)

MIGRATED = "9000"
MIGRATION = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "9000", "{head}", None, None

def upgrade():
    op.create_table("colours", sa.Column("name", sa.String(9), primary_key=True))
    op.add_column("brokers", sa.Column("colour", sa.String(9), nullable=False, server_default="red"))
"""


def minor_version(ahead: int) -> str:
    """The version that is `ahead` minor versions above this tree's."""
    return f"{OWN.major}.{OWN.minor + ahead}.0"


class Releases:
    """Builds versions when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, version: str) -> Path:
        """A folder for PYTHONPATH that has keylane of this version."""
        target = self._folder / version
        if not target.exists():
            _write_package(target / "keylane", version)
        return target


def _write_package(package: Path, version: str) -> None:
    tag = f"v{version}"
    asked = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"refs/tags/{tag}"]
    if subprocess.run(asked, capture_output=True, check=False).returncode == 0:
        archive = ["git", "-C", str(ROOT), "archive", "--format=tar", tag]
        packed = subprocess.run(archive, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(package, filter="data")
        return
    # With what is compiled of it, which stays valid: copies keep their times.
    shutil.copytree(ROOT, package, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for name in VERSIONED:
        path = package / name
        text, count = NUMBER.subn(rf'\1"{version}"', path.read_text(encoding="utf-8"))
        assert count == 1, name
        path.write_text(text, encoding="utf-8")
    if version > minor_version(0):
        _add_migration(package)


def _add_migration(package: Path) -> None:
    path = package / "metaserver/sql/migrate.py"
    text = path.read_text(encoding="utf-8")
    head = f'HEAD = "{HEAD}"'
    assert text.count(head) == 1
    path.write_text(text.replace(head, f'HEAD = "{MIGRATED}"'), encoding="utf-8")
    migration = package / f"migrations/versions/{MIGRATED}_of_a_test.py"
    migration.write_text(MIGRATION.format(head=HEAD), encoding="utf-8")
