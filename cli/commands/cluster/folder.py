"""The folder that `keylane cluster init` wrote: the authority and, for each host, its settings,
certificate and token. Reads it, and changes it in steps that can be repeated after a crash.

    DIR/ca.pem         the authority, or two of them while it is being replaced
    DIR/ca.key         the key that signs new certificates
    DIR/ca.next.*      the new authority, until it signs
    DIR/ca.old.pem     the old authority, until it is removed
    DIR/HOST/…         what is copied to /etc/keylane of the host
    DIR/HOST/GROUP/…   the files of a second broker on the host
    DIR/HOST.leaving.json  where the broker group of a host moves, while it does
    DIR/HOST.*.token   the new and the old token of its broker while it is being replaced
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ....protocol.access.tokens import make_token, token_hash
from ....protocol.errors import ConfigError, Reason
from ....rpc.access.token_file import token_in_file
from .plan import BROKER_FILE, CONFIG_FOLDER, SETTINGS_FILE, join_address

SECRET, PUBLIC = 0o600, 0o644
AUTHORITY, AUTHORITY_KEY = "ca.pem", "ca.key"
NEXT_AUTHORITY, NEXT_KEY, OLD_AUTHORITY = "ca.next.pem", "ca.next.key", "ca.old.pem"
HASHES = "broker_token_hashes"
PROGRAMS = ("metaserver", "broker")
LEAVING = "leaving.json"
UNITS = {program: f"keylane-{program}" for program in PROGRAMS}


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the cluster, or a second broker on one, with its folder of files."""

    name: str
    """The name of the host; of a second broker "HOST/GROUP"."""
    folder: Path
    tables: Mapping[str, Mapping[str, Any]]
    """The settings of each program, by program."""

    @property
    def machine(self) -> str:
        """The name at which the host is reached."""
        return self.name.partition("/")[0]

    @property
    def delivered(self) -> Path:
        """The folder that is copied to the host."""
        return self.folder.parent if "/" in self.name else self.folder

    @property
    def config_folder(self) -> str:
        """Where the host has the files."""
        return config_folder(self.name)

    @property
    def servers(self) -> list[tuple[str, str]]:
        """The programs on the host, with the addresses at which they answer in every state."""
        return [
            (
                program,
                join_address(
                    table.get("advertised_host") or table["host"],
                    table.get("health_port") or table["port"],
                ),
            )
            for program, table in self.tables.items()
        ]

    @property
    def broker_address(self) -> str:
        """The address at which the host's broker serves clients."""
        broker = self.tables["broker"]
        return join_address(broker.get("advertised_host") or broker["host"], broker["port"])

    @property
    def group(self) -> str:
        """The broker group of the host's broker; "" if it has none."""
        return str(self.tables.get("broker", {}).get("group", ""))

    @property
    def may_be_silent(self) -> bool:
        """True if the host's broker may be a follower that answers nowhere."""
        broker = self.tables.get("broker", {})
        return bool(broker.get("follow") or broker.get("failover")) and not broker.get(
            "health_port"
        )

    @property
    def units(self) -> str:
        """The names of the systemd units."""
        return " ".join(unit_name(self.name, program) for program in self.tables)

    def token(self) -> str:
        """Return the token of the host's broker. Raises ConfigError."""
        return token_in_file(self.folder / BROKER_FILE)


class Leaving(msgspec.Struct, frozen=True):
    """A broker group that moves to another host."""

    to: str
    """The name of the host."""
    wanted: int
    """How many data folders the group was to have before."""
    least: int
    """How many of them had to have a message before it was acked."""


@dataclass(frozen=True, slots=True)
class ClusterFolder:
    """The folder of a cluster."""

    path: Path
    hosts: Mapping[str, Host]

    @classmethod
    def read(cls, path: Path) -> ClusterFolder:
        """
        Read the hosts of the folder.

        Raises:
            ConfigError: it is not the folder of a cluster, or a file in it cannot be read.
        """
        hosts = {}
        try:
            files = [*path.glob(f"*/{SETTINGS_FILE}"), *path.glob(f"*/*/{SETTINGS_FILE}")]
        except OSError as error:
            raise _folder_error(path, error) from error
        for folder in sorted(file.parent.relative_to(path) for file in files):
            if not any(part.startswith(".") for part in folder.parts):
                hosts[str(folder)] = _read_host(path / folder, str(folder))
        if not hosts or not (path / AUTHORITY).exists():
            raise ConfigError(
                Reason.CLUSTER_FOLDER,
                f"{path} has not the files of `keylane cluster init`: {AUTHORITY}, and a folder "
                "for each host",
                path=str(path),
            )
        return cls(path, hosts)

    @property
    def metaservers(self) -> list[str]:
        """The addresses of all metaservers."""
        return [
            address
            for host in self.hosts.values()
            for program, address in host.servers
            if program == "metaserver"
        ]

    def select(self, names: Sequence[str]) -> list[Host]:
        """Return the hosts with these names, or all if there are none. Raises ConfigError."""
        return [self.host(name) for name in names] if names else list(self.hosts.values())

    def host(self, name: str) -> Host:
        """Return a host. Raises ConfigError if it is unknown."""
        if name not in self.hosts:
            raise ConfigError(
                Reason.HOST_UNKNOWN,
                f"{name!r:.80} is not a host of {self.path}, which has {', '.join(self.hosts)}",
            )
        return self.hosts[name]

    # ── the authority ─────────────────────────────────────────────────────────────────────────────
    def put_authority(self, pem: bytes) -> None:
        """Write the authorities that all servers and clients are to trust, for every host."""
        for host in self.hosts.values():
            replace_file(host.folder / AUTHORITY, pem, PUBLIC)
        replace_file(self.path / AUTHORITY, pem, PUBLIC)

    # ── the tokens ────────────────────────────────────────────────────────────────────────────────
    def put_hashes(self, *, add: Mapping[str, str], drop: Sequence[str] = ()) -> bool:
        """
        Change the brokers' tokens that metaservers know, in the settings of each metaserver.

        Args:
            add: the broker group of each new token's hash.
            drop: hashes that are removed.

        Returns:
            True if a file was changed.
        """
        is_changed = False
        for host in self.hosts.values():
            if "metaserver" in host.tables:
                path = host.folder / SETTINGS_FILE
                present = tomllib.loads(path.read_text("utf-8"))["metaserver"].get(HASHES, [])
                kept = [entry for entry in present if entry.partition(":")[2] not in drop]
                new = [f"{group}:{digest}" for digest, group in add.items()]
                wanted = list(dict.fromkeys([*kept, *new]))
                if wanted != present:
                    _set_value(path, "metaserver", HASHES, wanted)
                    is_changed = True
        return is_changed

    def next_token_path(self, host: Host) -> Path:
        """Return the path of a host's new token, until its files have it."""
        return self._beside(host.name, "next.token")

    def old_token_path(self, host: Host) -> Path:
        """Return the path of a host's old token, until no metaserver accepts it."""
        return self._beside(host.name, "old.token")

    def _beside(self, name: str, suffix: str) -> Path:
        """Return the path of a file about a host that is not for the host."""
        return self.path / f"{name.replace('/', '+')}.{suffix}"

    def tokens_of(self, host: Host) -> list[str]:
        """Return all tokens that metaservers may accept from a host's broker. Raises
        ConfigError.
        """
        if not host.group:
            return []
        replaced = [self.next_token_path(host), self.old_token_path(host)]
        return [host.token(), *(token_in_file(path) for path in replaced if path.exists())]

    def put_metaservers(self, addresses: Sequence[str]) -> None:
        """Write the metaservers' addresses into the settings of each broker."""
        for host in self.hosts.values():
            if host.group:
                _set_value(host.folder / SETTINGS_FILE, "broker", "meta", list(addresses))

    # ── hosts ─────────────────────────────────────────────────────────────────────────────────────
    def add_host(self, name: str, files: Mapping[str, tuple[bytes, int]]) -> None:
        """Add the folder of a host, all of its files at once."""
        folder = self.path / name
        staged = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(mode=0o700)
        for file, (content, mode) in files.items():
            replace_file(staged / file, content, mode)
        staged.rename(folder)

    def leaving(self, host: Host) -> Leaving | None:
        """Return where the broker group of a host moves; None if it does not. Raises
        ConfigError.
        """
        path = self._beside(host.name, LEAVING)
        try:
            return msgspec.json.decode(path.read_bytes(), type=Leaving)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise _folder_error(path, error) from error

    def put_leaving(self, host: Host, leaving: Leaving) -> None:
        """Note where the broker group of a host moves."""
        replace_file(self._beside(host.name, LEAVING), msgspec.json.encode(leaving), PUBLIC)

    def end_leaving(self, host: Host) -> None:
        """Forget where the broker group of a host moves."""
        self._beside(host.name, LEAVING).unlink(missing_ok=True)

    def remove_host(self, host: Host) -> None:
        """Remove what is there of a host, with its tokens and its key, the folder at once and
        last.
        """
        for suffix in ("next.token", "old.token", LEAVING):
            self._beside(host.name, suffix).unlink(missing_ok=True)
        removed = host.folder.with_name(f".{host.folder.name}.removed")
        shutil.rmtree(removed, ignore_errors=True)
        host.folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def draw_token() -> tuple[str, str]:
    """Return a new token and its hash."""
    token = make_token(secrets.randbits)
    return token, token_hash(token)


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Replace a file as a whole. Raises ConfigError if it cannot be written; then the old one is
    unchanged.
    """
    staged = path.with_name(f".{path.name}.new")
    try:
        staged.unlink(missing_ok=True)
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError as error:
        raise _folder_error(path, error) from error


def config_folder(name: str) -> str:
    """Return where a host has the files of a folder `HOST` or `HOST/GROUP`."""
    _, slash, group = name.partition("/")
    return f"{CONFIG_FOLDER}{slash}{group}"


def unit_name(name: str, program: str) -> str:
    """Return the name of a systemd unit of a folder `HOST` or `HOST/GROUP`."""
    _, slash, group = name.partition("/")
    return UNITS[program] + slash.replace("/", "-") + group


def _read_host(folder: Path, name: str) -> Host:
    path = folder / SETTINGS_FILE
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
        present = {program: tables[program] for program in PROGRAMS if program in tables}
        host = Host(name, folder, present)
        assert host.servers
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise _folder_error(path, error) from error
    return host


def _folder_error(path: Path, error: Exception) -> ConfigError:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, KeyError):
        text = f"the setting {text} is missing"
    return ConfigError(
        Reason.CLUSTER_FOLDER, f"cannot use {path}: {text or 'no program'}", path=str(path)
    )


def _set_value(path: Path, program: str, name: str, value: object) -> None:
    """Set a setting that has a line of its own, and leave all other lines of the file as they are.
    Raises ConfigError if that is not possible.
    """
    text = path.read_text("utf-8")
    wanted = tomllib.loads(text)
    wanted[program][name] = value
    line = f"{name} = {json.dumps(value)}"
    header = f"[{program}]\n"
    before, found, after = text.partition(header)
    table, bracket, rest = after.partition("\n[")
    # a list may be written over several lines
    pattern = re.compile(rf"^{name}\s*=\s*(\[[^\]]*\]|.*)", re.MULTILINE)
    if pattern.search(table):
        table = pattern.sub(lambda _: line, table, count=1)
    else:
        table = f"{line}\n{table}"
    changed = before + found + table + bracket + rest
    try:
        is_as_wanted = tomllib.loads(changed) == wanted
    except tomllib.TOMLDecodeError:
        is_as_wanted = False
    if not is_as_wanted:
        raise ConfigError(
            Reason.CLUSTER_FOLDER,
            f"cannot change {name} in {path}: write it as {line}",
            path=str(path),
        )
    replace_file(path, changed.encode(), SECRET)
