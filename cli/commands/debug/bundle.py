"""`keylane debug bundle`: asks every server at once, each within its time limit, and writes the
answers to one file.

    this host ─┐
    metaservers ─▶ subjects, groups, operations, copies ─┐
            └─▶ brokers ─▶ health, metrics, partitions ──┴─▶ Contents ─▶ FILE.tar.gz (mode 0600)
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import os
import platform
import tarfile
import time
import tomllib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from re import match
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ....protocol import endpoints
from ....protocol.address import parse_addresses
from ....protocol.control import BrokerView, SubjectSummary
from ....protocol.errors import ConfigError, KeylaneError, StorageError
from ....protocol.http.tls_settings import TlsSettings
from ....protocol.text import counted, format_time
from ....rpc.access.token_file import token_in_file, token_source
from ....rpc.client import BrokerClient, MetaClient
from ....rpc.connections import gather_limited
from ....rpc.http_network import HttpNetwork, client_network
from ....rpc.tls.settings import tls_of_environment
from ...options import OutputFormat
from ...screen import make_table, show_data, show_line, show_table
from ...status import showing
from ..cluster.findings import ServerReport, judge_reports
from ..cluster.reports import fetch_report
from ..programs import ServerProgram, import_sources
from .contents import (
    MASK,
    Contents,
    WrittenBundle,
    file_name,
    is_secret,
    log_lines,
    parked_without_values,
    status_without_values,
    variables_without_secrets,
)

SUBJECTS_MAX = 1_000
PARKED_MAX = 100
"""The largest number of keys that a group has parked on a partition, and of such pairs of a group
and a partition of a broker.
"""
LOG_LINES_MAX = 1_000
LOG_BYTES_MAX = 1 << 20
BROKERS = "the list of brokers"
PROMISE = (
    "It has no values and no keys of messages, and no tokens, passwords or other secrets. It has "
    "names: of subjects, groups, clients, hosts and files."
)


async def write_bundle(
    meta: str,
    output: OutputFormat,
    *,
    file: Path | None,
    configs: Sequence[Path],
    logs: Path | None,
    brokers: Sequence[str],
    timeout_s: float,
    overwrite: bool,
) -> None:
    """
    Ask every server, write the bundle, and show what is in it and what is not.

    Raises:
        ConfigError: the file exists, or an address or a TLS file cannot be used.
        StorageError: the file cannot be written.
    """
    made_at = time.gmtime()
    path = file or Path(time.strftime("keylane-debug-%Y%m%dT%H%M%SZ.tar.gz", made_at))
    _check_free(path, overwrite=overwrite)
    addresses = parse_addresses(meta)
    given_brokers = [address for each in brokers for address in parse_addresses(each)]
    contents = Contents(_secrets(configs), salt=os.urandom(16))
    contents.add("about.json", "this host, its versions and variables", _describe_host(meta))
    for config in configs:
        _add_settings(contents, config)
    with showing("asking the servers"):
        await _ask_servers(contents, addresses, given_brokers, timeout_s)
    if logs is not None:
        _add_logs(contents, logs)
    contents.add_listing(PROMISE, made_at=format_time(int(time.time() * 1000)))
    size_bytes = _write(path, contents.parts, overwrite=overwrite)
    _show(path, size_bytes, contents, output)


# ── this host ─────────────────────────────────────────────────────────────────────────────────────
def _describe_host(meta: str) -> dict[str, object]:
    names = {match(r"[A-Za-z0-9._-]+", each) for each in requires("keylane") or ()}
    packages = {}
    for name in sorted({each[0] for each in names if each is not None}):
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "keylane": version("keylane"),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "packages": packages,
        "meta": meta,
        "clock_ms": int(time.time() * 1000),
        "environment": variables_without_secrets(os.environ),
    }


def _read_settings(config: Path) -> dict[str, list[Any]]:
    """Return the settings in a file by program, for each program to which it belongs."""
    found = {}
    for program in ServerProgram:
        with contextlib.suppress(ConfigError, ModuleNotFoundError):
            found[program.value] = import_sources(program).explain({}, config, dict(os.environ))
    return found


def _add_settings(contents: Contents, config: Path) -> None:
    found = _read_settings(config)
    unread = [program for program in _programs_in(config) if program not in found]
    for program in unread:
        contents.miss(
            f"the settings of a {program} in {config}",
            f"they cannot be read: see keylane config show {program} --config {config}",
        )
    if not (unread or found):
        contents.miss(f"the settings in {config}", "it is no settings file of a server")
    for program, settings in found.items():
        values = {
            each.name: {
                "value": MASK if is_secret(each.name) and each.value else each.shown,
                "origin": each.origin,
            }
            for each in settings
        }
        name = f"settings/{program}-{file_name(config.name)}.json"
        contents.add(name, f"settings of a {program}, from {config}", values)


def _programs_in(config: Path) -> list[str]:
    """Return the programs that have a table in a settings file."""
    with contextlib.suppress(OSError, ValueError):
        document = tomllib.loads(config.read_text("utf-8"))
        return [program.value for program in ServerProgram if program.value in document]
    return []


def _secrets(configs: Iterable[Path]) -> list[str]:
    """Return the secrets that this command can read, so that no text may quote them."""
    secrets = [
        value
        for name, value in os.environ.items()
        if name.startswith("KEYLANE_") and is_secret(name)
    ]
    with contextlib.suppress(KeylaneError):
        source = token_source(None)
        secrets += [] if source is None else [source()]
    for config in configs:
        for setting in (each for found in _read_settings(config).values() for each in found):
            if setting.name.endswith("token_file") and isinstance(setting.value, Path):
                with contextlib.suppress(KeylaneError):
                    secrets.append(token_in_file(setting.value, wait_s=0.0))
            elif isinstance(setting.value, str) and setting.value != setting.shown:
                secrets.append(urlsplit(setting.value).password or "")
    return secrets


def _add_logs(contents: Contents, folder: Path) -> None:
    try:
        files = sorted(each for each in folder.iterdir() if each.suffix == ".log")
    except OSError as error:
        contents.miss(f"logs in {folder}", str(error.strerror))
        return
    if not files:
        contents.miss(f"logs in {folder}", "it has no file that ends in .log")
    for each in files:
        try:
            with each.open("rb") as log:
                log.seek(max(0, each.stat().st_size - LOG_BYTES_MAX))
                text = log.read(LOG_BYTES_MAX).decode(errors="replace")
        except OSError as error:
            contents.miss(f"log {each}", str(error.strerror))
            continue
        taken, others = log_lines(text.splitlines()[-LOG_LINES_MAX:])
        if taken:
            contents.add(f"logs/{file_name(each.name)}", "the end of a log", "\n".join(taken))
        if others:
            contents.miss(
                f"{counted(others, 'line')} of {each}",
                "they are not JSON lines of a server, and may hold values",
            )


# ── servers ───────────────────────────────────────────────────────────────────────────────────────
async def _ask_servers(
    contents: Contents, metaservers: Sequence[str], brokers: Sequence[str], timeout_s: float
) -> None:
    """Ask all servers at once. Raises ConfigError if a TLS file or the token cannot be used."""
    tls = tls_of_environment()
    network = client_network(tls)
    asking = _Asking(contents, network, tls, timeout_s)
    meta = MetaClient(network, metaservers, timeout_ms=max(100, int(timeout_s * 500)))
    try:
        views: list[BrokerView] | None = None
        async with asking.within(BROKERS):
            health = await meta.health()
            known = health.details.get("brokers")
            if known is None:  # it has not read its database yet
                contents.miss(BROKERS, health.reason or f"a {health.program} answers there")
            else:
                views = msgspec.convert(known, list[BrokerView])
        named = [each.address for each in views or ()]
        await asyncio.gather(
            asking.ask_cluster(meta, views),
            *(asking.ask_server("metaserver", address) for address in metaservers),
            *(asking.ask_server("broker", each) for each in dict.fromkeys([*named, *brokers])),
        )
    finally:
        await network.close()
    findings = judge_reports(asking.reports, own_version=version("keylane"), now_s=time.time())
    contents.add(
        "check.json",
        "clocks, certificates, versions and disks, as keylane cluster check sees them",
        {"servers": asking.reports, "findings": findings},
    )


class _Asking:
    """Asks the servers of a cluster, each within a time. What a server has answered before its time
    is over is in the bundle.
    """

    def __init__(
        self, contents: Contents, network: HttpNetwork, tls: TlsSettings | None, timeout_s: float
    ) -> None:
        self.reports: list[ServerReport] = []
        self._contents = contents
        self._network = network
        self._tls = tls
        self._timeout_s = timeout_s

    @contextlib.asynccontextmanager
    async def within(self, what: str) -> AsyncIterator[None]:
        """Limit the time of the block, and note what was not complete then, or was refused."""
        try:
            async with asyncio.timeout(self._timeout_s):
                with self._noting(what):
                    yield
        except TimeoutError:
            self._contents.miss(what, f"it was not complete after {self._timeout_s:g} s")

    @contextlib.contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except KeylaneError as error:
            self._contents.miss(what, error.message)

    async def ask_server(self, program: str, address: str) -> None:
        """Ask a server for its clock, metrics and health, and a broker for its partitions."""
        folder, what = f"servers/{program}-{file_name(address)}", f"{program} {address}"
        timeout_ms = int(self._timeout_s * 1000)
        async with self.within(what):
            report = await fetch_report(self._network, self._tls, program, address)
            self.reports.append(report)
            if report.failure:
                self._contents.miss(what, report.failure)
                return
            text, _ = await self._network.get_text(
                address, endpoints.METRICS.path, timeout_ms=timeout_ms
            )
            self._contents.add(f"{folder}/metrics.txt", f"metrics of {what}", text)
            server = BrokerClient(self._network, address, timeout_ms=timeout_ms)
            health = await server.control(endpoints.HEALTH)
            self._contents.add(f"{folder}/health.json", f"health of {what}", health)
            if program == "broker":
                await self._ask_partitions(server, folder, what)

    async def _ask_partitions(self, broker: BrokerClient, folder: str, what: str) -> None:
        hosted = await broker.partitions()
        statuses = [status_without_values(each) for each in hosted.partitions]
        self._contents.add(
            f"{folder}/partitions.json",
            f"offsets, cursors, fences and pull locks on {what}",
            {"broker_id": hosted.broker_id, "partitions": statuses},
        )
        pairs = [
            (status.partition_id, group.group)
            for status in statuses
            for group in status.groups
            if group.parked
        ]
        parked = []
        for partition_id, group in pairs[:PARKED_MAX]:
            query = {"group": group, "count": PARKED_MAX, "retrying": 1}
            page = await broker.control(endpoints.PARKED, query=query, id=partition_id)
            parked.append(
                {
                    "partition_id": partition_id,
                    "group": group,
                    "more": page.more,
                    "keys": [*map(parked_without_values, page.keys)],
                }
            )
        if parked:
            self._contents.add(
                f"{folder}/parked.json", f"parked keys (salted digests) on {what}", parked
            )
        if len(pairs) > PARKED_MAX:
            self._contents.miss(
                f"some parked keys on {what}",
                f"only {PARKED_MAX} of {len(pairs)} pairs of a partition and a group are asked for",
            )

    async def ask_cluster(self, meta: MetaClient, brokers: Sequence[BrokerView] | None) -> None:
        """Ask a metaserver what it knows of subjects, groups and copies. `brokers` is None if
        nobody has named them.
        """
        if brokers is None:
            self._contents.miss("the copies of broker groups", f"{BROKERS} is missing")
        summaries: list[SubjectSummary] = []
        async with self.within("copies, and some of the subjects"):
            with self._noting("the copies of broker groups"):
                copies = {
                    each.broker_group: await meta.call(endpoints.COPY_SET, group=each.broker_group)
                    for each in brokers or ()
                }
                if brokers is not None:
                    self._contents.add("copies.json", "the copies that acks wait for", copies)
            summaries = (await meta.call(endpoints.SUBJECTS)).subjects
            self._contents.add("subjects.json", "all subjects", summaries)
            ask = partial(self._ask_subject, meta)
            await gather_limited(ask, (each.subject for each in summaries[:SUBJECTS_MAX]))
        if len(summaries) > SUBJECTS_MAX:
            self._contents.miss(
                counted(len(summaries) - SUBJECTS_MAX, "subject"),
                f"only the first {SUBJECTS_MAX} are asked for",
            )

    async def _ask_subject(self, meta: MetaClient, name: str) -> None:
        with self._noting(f"subject {name}"):
            operations = await meta.call(endpoints.OPERATIONS, subject=name)
            groups = (await meta.call(endpoints.GROUPS, subject=name)).groups
            self._contents.add(
                f"subjects/{file_name(name)}.json",
                f"route, groups, sessions, leases and operations of {name}",
                {
                    "subject": await meta.call(endpoints.SUBJECT, subject=name),
                    "operations": operations.operations,
                    "history": (await meta.call(endpoints.HISTORY, subject=name)).partitions,
                    "groups": [
                        await meta.call(endpoints.GROUP, subject=name, group=each)
                        for each in groups
                    ],
                },
            )


# ── the file ──────────────────────────────────────────────────────────────────────────────────────
def _check_free(path: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if the file exists and is not to be replaced."""
    if not overwrite and os.path.lexists(path):
        raise _exists(path)


def _exists(path: Path) -> ConfigError:
    return ConfigError(f"{path} exists: name another file, or pass --overwrite", path=str(path))


def _write(path: Path, parts: dict[str, bytes], *, overwrite: bool) -> int:
    """
    Write the bundle, which only its owner can read. Returns its size in bytes.

    Raises:
        ConfigError: the file exists.
        StorageError: it cannot be written.
    """
    data = _archive(path.name.split(".")[0], parts)
    written = path.with_name(f".{path.name}.{os.getpid()}") if overwrite else path
    try:
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            written.replace(path)
        except OSError:
            written.unlink(missing_ok=True)
            raise
    except FileExistsError:
        raise _exists(written) from None
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    return len(data)


def _archive(folder: str, parts: dict[str, bytes]) -> bytes:
    """Return a .tar.gz with the parts in a folder."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as stream:
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for name, data in sorted(parts.items()):
                member = tarfile.TarInfo(f"{folder}/{name}")
                member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
                archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def _show(path: Path, size_bytes: int, contents: Contents, output: OutputFormat) -> None:
    if output is not OutputFormat.TABLE:
        written = WrittenBundle(
            file=str(path),
            size_bytes=size_bytes,
            entries=contents.entries,
            missing=contents.missing,
        )
        show_data(output, written)
        return
    rows = [(each.name, f"{each.size_bytes:,}", each.what) for each in contents.entries]
    show_table(make_table("in the bundle", ("part", "bytes#", "what"), rows))
    if contents.missing:
        missing = [(each.what, each.reason) for each in contents.missing]
        show_table(make_table("not in the bundle", ("what", "why"), missing))
    show_line(f"Wrote {path}: {size_bytes:,} bytes, which only you can read.")
    show_line(PROMISE)
