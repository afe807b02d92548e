"""What is refused of programs of another version, and of databases of another cluster.  Pure."""

from __future__ import annotations

from .base import Detail
from .refusals import ConfigError, RefusedError


class ClientTooOldError(RefusedError):
    """The client is over one minor version older than the server, or was never released."""

    code = 1360
    summary = "the client is too old for the server"
    hint = "Upgrade keylane where the client runs, to the server's version or the one before it."
    client = Detail(str)
    server = Detail(str)


class ServerTooOldError(RefusedError):
    """The server is over one minor version older than the client, or was never released."""

    code = 1361
    summary = "the server is too old for the client"
    hint = (
        "Upgrade the servers, one minor version at a time; until then use a client of their "
        "version or the next one."
    )
    client = Detail(str)
    server = Detail(str)


class UpgradeSkippedError(RefusedError):
    """A server is more than one minor version newer than the cluster; nothing was changed."""

    code = 1362
    summary = "an upgrade skips a version"
    hint = (
        "Install the next minor version on every host, start all brokers and metaservers, and wait "
        "until keylane cluster versions shows it; then continue."
    )
    version = Detail(str)
    cluster = Detail(str)


class MemberTooOldError(RefusedError):
    """A server is older than the version that the whole cluster had reached; nothing was
    changed.
    """

    code = 1363
    summary = "the cluster has been upgraded past this version"
    hint = "Install the cluster's version: keylane cluster versions shows it."
    version = Detail(str)
    cluster = Detail(str)


class OtherClusterError(RefusedError):
    """A program and the database or metaserver that it was given are of two clusters; nothing was
    changed.
    """

    code = 1365
    summary = "this is of another cluster"
    hint = (
        "Each cluster has its own database.  Check that the setting database_url, or meta, belongs "
        "to this cluster; the setting cluster holds the cluster's name."
    )
    expected = Detail(str)
    actual = Detail(str)


class BackupFileError(ConfigError):
    """The file of a backup cannot be written or read, is damaged, or of another version; nothing
    was changed.
    """

    code = 1366
    summary = "the file of the backup cannot be used"
    hint = (
        "Give a complete file written by keylane meta backup, and use the keylane version that "
        "wrote it or the next one."
    )
    path = Detail(str)


class DatabaseInUseError(ConfigError):
    """A backup is restored only to an empty database; nothing was changed."""

    code = 1367
    summary = "the database is not empty"
    hint = "Give a new folder or a new database; the contents of this one may still be needed."


class SchemaTooNewError(ConfigError):
    """The database has a schema of a newer keylane, which this one cannot use; nothing was
    changed.
    """

    code = 1390
    summary = "the schema of the database is too new for this keylane"
    hint = (
        "Install the version of the cluster's other metaservers.  To go back, restore a backup "
        "from before the upgrade: keylane meta restore."
    )
    revision = Detail(str)
    reader = Detail(str)
